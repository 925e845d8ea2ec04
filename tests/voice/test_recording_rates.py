"""A recording keeps its rate through every door, so that CosyVoice3's mel has its bands between 8 and 12 kHz.

What is compared is the mel of a tone of 10 kHz: a door that makes 16 kHz of it leaves nothing there.
"""

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf
import torch
from cosyvoice_triton.client.utterance import Utterance, of_recording, read_reference
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.load.samples import read_manifest
from cosyvoice_triton.orchestrator.request import RequestRules
from cosyvoice_triton.speech_service.audio.recordings import decode
from cosyvoice_triton.speech_service.voices import VoiceFolder
from cosyvoice_triton.stacks import COSYVOICE3, DEFAULT
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.encoders import reference_mel
from cosyvoice_triton.voice.features import MelConfig, mel_spectrogram
from cosyvoice_triton.voice.files import read_voice, save_recording
from cosyvoice_triton.voice.model import reference
from cosyvoice_triton.voice.prompt import Recording
from cosyvoice_triton.voice.recordings import parse_recording

from tests.support import fake_triton
from tests.support.speech_fixtures import StubbedService

MIB = 1 << 20
TONE_HZ = 10_000


def tone(rate: int, hz: float = TONE_HZ) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(rate) / rate)).astype(np.float32)


def has_the_tone(recording: Any) -> bool:
    """Whether the strongest band of the prompt's mel is that of the tone, as in the mel of a clean tone."""
    assert isinstance(recording, Recording)
    mel = reference_mel(recording, COSYVOICE3.mel_max_hz)[20:-20].mean(axis=0)  # (80,)
    config = MelConfig(max_hz=COSYVOICE3.mel_max_hz)
    clean = mel_spectrogram(torch.from_numpy(tone(SAMPLE_RATE))[None], config)[0, :, 20:-20].mean(dim=1).numpy()
    return bool(mel.argmax() == clean.argmax() and abs(mel.max() - clean.max()) < 0.2)


def received(arrays: dict[str, np.ndarray]) -> Any:
    """The recording that the orchestrator makes of a request's inputs (1, N) without texts."""
    wav, rate = arrays["reference_wav"], arrays.get("reference_sample_rate")
    rate = None if rate is None else int(rate.item())
    return RequestRules().request("Hello.", reference_wav=wav, reference_sample_rate=rate).voice


def of_command_line(path: Path) -> Any:
    arrays = Utterance("Hello.", **of_recording(read_reference(path))).arrays()
    return received({name: array for name, (_, array) in arrays.items()})


def of_service_folder(path: Path) -> Any:
    folder = VoiceFolder(path.parent / "voices", MIB)
    assert folder.add("anna", path.read_bytes(), "").seconds == 1
    return folder.get("anna")


def of_manifest(path: Path) -> Any:
    manifest = path.with_suffix(".lst")
    manifest.write_text(f"one|It says.|{path}|Hello.\n")
    return read_manifest(manifest)[0].prompt_audio


def of_token2wav(path: Path) -> Any:
    found = parse_recording(path.read_bytes())
    tensors = {"reference_wav": found.wav[None], "reference_sample_rate": np.array([[found.rate]], np.int32)}
    return reference(fake_triton.InferenceRequest.from_client(tensors, declared=frozenset(tensors)))


DOORS: dict[str, Callable[[Path], Any]] = {
    "a command line, the Python API, a request over gRPC": of_command_line,
    "an upload": lambda path: decode(path.read_bytes(), MIB),
    "a file in the voices' folder": lambda path: VoiceBook(path.parent, path.parent, str).get(path.stem),
    "a voice registered over HTTP": of_service_folder,
    "a manifest": of_manifest,
    "token2wav": of_token2wav,
}


@pytest.mark.parametrize("rate", [24_000, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_tone_of_10_khz_reaches_the_mel_of_cosyvoice3(door: Callable[[Path], Any], rate: int, tmp_path: Path) -> None:
    sf.write(tmp_path / "tone.wav", tone(rate), rate)
    assert has_the_tone(door(tmp_path / "tone.wav"))


def test_a_recording_of_a_browser_or_phone_keeps_its_upper_bands() -> None:
    sink = io.BytesIO()
    with av.open(sink, "w", format="webm") as file:
        stream: Any = file.add_stream("libopus", rate=48_000, layout="mono")
        stream.bit_rate = 128_000
        frame = av.AudioFrame.from_ndarray(tone(48_000)[None], format="flt", layout="mono")
        frame.sample_rate = 48_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)
    assert has_the_tone(decode(sink.getvalue(), MIB))


def sent_to_triton(served: StubbedService) -> dict[str, np.ndarray]:
    kinds = {"FP32": np.float32, "INT32": np.int32}
    request = served.stub.requests[-1]
    pairs = zip(request.inputs, request.raw_input_contents, strict=True)
    return {
        tensor.name: np.frombuffer(raw, kinds[tensor.datatype]).reshape(tensor.shape).copy()
        for tensor, raw in pairs
        if tensor.datatype in kinds
    }


def test_the_service_passes_the_rate_of_a_recording_on(served: StubbedService) -> None:
    sink = io.BytesIO()
    sf.write(sink, tone(48_000), 48_000, format="WAV")
    files = {"ref_audio": ("a.wav", sink.getvalue())}
    answer = httpx.post(f"{served.url}/v1/audio/speech", data={"input": "Hello."}, files=files, timeout=20)
    assert answer.status_code == 200 and has_the_tone(received(sent_to_triton(served)))


def test_tritons_http_protocol_has_the_rate_too(served: StubbedService) -> None:
    inputs = [
        {"name": "target_text", "datatype": "BYTES", "shape": [1, 1], "data": ["Hello."]},
        {"name": "reference_wav", "datatype": "FP32", "shape": [1, 24_000], "data": tone(24_000).tolist()},
        {"name": "reference_sample_rate", "datatype": "INT32", "shape": [1, 1], "data": [24_000]},
    ]
    path = f"/v2/models/{DEFAULT.orchestrator}/infer"
    assert served.post({"inputs": inputs}, path).status_code == 200
    assert has_the_tone(received(sent_to_triton(served)))
    inputs[2]["data"] = [24_001]
    answer = served.post({"inputs": inputs}, path)
    assert answer.status_code == 400 and "reference_sample_rate 24001" in answer.json()["error"]


def test_a_rate_of_16_khz_is_not_sent_so_that_upstreams_server_answers() -> None:
    assert "reference_sample_rate" not in Utterance("Hello.", tone(PROMPT_SAMPLE_RATE, 440)).arrays()


def test_without_a_rate_samples_are_16_khz_and_its_limits_count_seconds() -> None:
    assert received({"reference_wav": tone(PROMPT_SAMPLE_RATE, 440)}).rate == PROMPT_SAMPLE_RATE
    long = np.tile(tone(48_000, 440), 30)
    rate = np.array([48_000])
    assert received({"reference_wav": long, "reference_sample_rate": rate}).seconds == 30
    with pytest.raises(ValueError, match="lasts 30.00002 s at 48000 Hz"):
        received({"reference_wav": np.append(long, np.float32(0)), "reference_sample_rate": rate})


@pytest.mark.parametrize("rate", [-16_000, 0, 7_975, 48_025, 44_101, 192_000])
def test_a_rate_that_is_not_carried_is_refused_by_name(rate: int) -> None:
    with pytest.raises(ValueError, match=f"reference_sample_rate {rate} is not a multiple of 25 from 8000 to 48000"):
        received({"reference_wav": tone(48_000, 440), "reference_sample_rate": np.array([rate])})
    with pytest.raises(ValueError, match="reference_sample_rate 24000 without a reference_wav"):
        RequestRules().request("Hello.", reference_sample_rate=24_000)


def test_equal_samples_of_different_rates_are_different_recordings() -> None:
    wav = tone(24_000, 440)
    assert Recording(wav, rate=24_000).digest != Recording(wav).digest


def test_a_voice_registered_at_16_khz_works_and_says_how_to_get_its_upper_bands(tmp_path, caplog) -> None:
    from safetensors.numpy import load_file, save_file

    save_recording(tmp_path / "new.safetensors", Recording(tone(24_000, 440), "Hi.", 24_000))
    save_recording(tmp_path / "old.safetensors", Recording(tone(16_000, 440), "Hi."))
    tensors = load_file(tmp_path / "old.safetensors")
    del tensors["reference_sample_rate"]
    save_file(tensors, tmp_path / "old.safetensors")
    book = VoiceBook(tmp_path, tmp_path, str, full_band=True)
    with caplog.at_level(logging.WARNING):
        assert isinstance(voice := book.get("new"), Recording) and voice.rate == 24_000 and not caplog.messages
        assert isinstance(read_voice(tmp_path / "old.safetensors"), Recording) and not caplog.messages
        for _ in range(3):
            assert isinstance(voice := book.get("old"), Recording) and voice.rate == PROMPT_SAMPLE_RATE
    assert caplog.messages == [
        "old.safetensors was registered when recordings were kept at 16 kHz: register it again for its upper bands"
    ]
