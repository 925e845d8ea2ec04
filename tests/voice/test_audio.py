"""Validation of recordings, resampling and features equal to the training libraries, and sound files. A recording keeps
its rate through every door, so that CosyVoice3's mel has its bands between 8 and 12 kHz: what is compared is the mel of
a tone of 10 kHz, of which a door that makes 16 kHz of it leaves nothing."""

import logging
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import torch
from cosyvoice_triton.client.utterance import Utterance, of_recording, read_reference
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.load.samples import read_manifest
from cosyvoice_triton.orchestrator.request import RequestRules
from cosyvoice_triton.speech_service.audio.recordings import decode
from cosyvoice_triton.speech_service.voices import NewVoice, VoiceFolder
from cosyvoice_triton.stacks import COSYVOICE3
from cosyvoice_triton.voice.audio import at_rate, load_audio, load_untrusted, save_audio
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.encoders import reference_mel
from cosyvoice_triton.voice.features import MelConfig, fbank, mel_spectrogram, resample
from cosyvoice_triton.voice.files import read_voice, save_voice
from cosyvoice_triton.voice.model import reference
from cosyvoice_triton.voice.prompt import Recording, validate_reference
from cosyvoice_triton.voice.recordings import parse_recording

from tests.support import fake_triton
from tests.support.sounds import sine, sound_file

SECOND = PROMPT_SAMPLE_RATE
TONE_HZ = 10_000


def tone(samples: int, rate: int = PROMPT_SAMPLE_RATE) -> np.ndarray:
    return sine(220, 0.5, samples / rate, rate)


def with_sample(value: float, index: int) -> np.ndarray:
    wav = tone(SECOND)
    wav[index] = value
    return wav


@pytest.mark.parametrize(
    ("wav", "length", "message"),
    [
        (np.zeros(0, np.float32), None, "reference_wav is empty"),
        (np.zeros(0, np.float32), 0, "reference_wav is empty"),
        (tone(SECOND), 0, r"reference_wav_len 0 is not in 1\.\.16000"),
        (tone(SECOND), -5, r"reference_wav_len -5 is not in 1\.\.16000"),
        (tone(SECOND), SECOND + 1, r"reference_wav_len 16001 is not in 1\.\.16000"),
        (tone(SECOND), 7999, "reference_wav of 7999 samples lasts 0.4999375 s"),
        (tone(100), None, "reference_wav of 100 samples lasts 0.00625 s"),
        (tone(30 * SECOND + 1), None, "reference_wav of 480001 samples lasts 30.00006 s"),
        (np.zeros(SECOND, np.float32), None, r"reference_wav is silent: its samples vary by 0\.0e\+00"),
        (np.full(SECOND, 0.5, np.float32), None, "reference_wav is silent"),
        (tone(SECOND) * 1e-5, None, r"reference_wav is silent: its samples vary by 5\.0e-06"),
        (with_sample(np.nan, 17), None, "reference_wav is nan at sample 17"),
        (with_sample(-np.inf, 400), None, "reference_wav is -inf at sample 400"),
        (np.ones(SECOND, np.int16), None, "reference_wav is int16 of shape"),
        (np.ones((2, SECOND), np.float32), None, r"reference_wav is float32 of shape \[2, 16000\]"),
        (np.float32(1), None, r"reference_wav is float32 of shape \[\]"),
        *(
            (with_sample(peak, 100), None, r"holds a sample of \S+: samples are -1..1; divide 16-bit ones by 32768")
            for peak in (5.0, 128.0, 32_767.0, 1e38, -32_768.0)
        ),
    ],
)
def test_a_bad_reference_is_rejected_with_its_name_and_value(wav, length, message):
    with pytest.raises(ValueError, match=message):
        validate_reference(np.asarray(wav), length)


@pytest.mark.parametrize(
    "wav", [*(with_sample(peak, 100) for peak in (1.0, 1.4, 2.0)), *(tone(int(of * SECOND)) for of in (0.5, 30.0))]
)
def test_samples_beyond_full_scale_as_decoding_makes_them_and_exactly_the_limits_of_the_duration_are_taken(wav):
    np.testing.assert_array_equal(validate_reference(wav), wav)


def test_a_malformed_file_prints_no_traceback(capfd):
    """cffi prints one for each exception of a call by libsndfile, such as a seek to before the file's begin."""
    random = np.random.default_rng(0)
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        whole = sound_file(random.standard_normal(4000) * 0.1, PROMPT_SAMPLE_RATE, kind)
        for _ in range(150):
            data = bytearray(whole[: random.integers(40, len(whole))])
            data[random.integers(0, 40)] = random.integers(256)
            with suppress(ValueError, RuntimeError):
                load_untrusted(bytes(data))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("padding", [0.0, np.nan, np.inf])
def test_samples_beyond_the_length_are_neither_checked_nor_used(padding):
    wav = tone(SECOND)
    padded = np.concatenate([wav, np.full(40 * SECOND, padding, np.float32)])
    np.testing.assert_array_equal(validate_reference(padded, SECOND), wav)
    batch = validate_reference(padded[None].astype(np.float64), SECOND)  # the batch dimension is removed
    assert (batch.shape, batch.dtype) == ((SECOND,), np.float32)
    with pytest.raises(ValueError, match="silent"):  # also with sound in the padding
        validate_reference(np.concatenate([np.zeros(SECOND, np.float32), wav]), SECOND)


@pytest.mark.parametrize(
    ("from_rate", "to_rate"), [(8000, 16000), (44100, 16000), (48000, 16000), (16000, 24000), (22050, 16000)]
)
@pytest.mark.parametrize("samples", [1, 997, 16000])
def test_resampling_keeps_the_duration(from_rate, to_rate, samples):
    resampled = resample(torch.from_numpy(tone(samples)), from_rate, to_rate)
    assert resampled.shape == (-(-samples * to_rate // from_rate),)


def test_features_of_other_sizes_follow_the_configuration():
    wav = torch.from_numpy(tone(4000))
    config = MelConfig(sample_rate=16_000, n_fft=1024, window=800, hop=200, bins=40, min_hz=50, max_hz=7600)
    assert mel_spectrogram(wav[None], config).shape == (1, 40, 20)


def test_a_wave_too_short_for_features_is_rejected():
    with pytest.raises(ValueError, match="a wave of 720 samples has no mel spectrogram"):
        mel_spectrogram(torch.zeros(1, 720))
    with pytest.raises(ValueError, match="a wave of 399 samples is shorter"):
        fbank(torch.zeros(399))


def test_filters_first_used_in_inference_mode_serve_training_too() -> None:
    """They are cached for the whole process, and autograd refuses tensors made in inference mode."""
    config = MelConfig(bins=39)  # not in the cache yet
    with torch.inference_mode():
        mel_spectrogram(torch.zeros(1, SECOND), config)
        resample(torch.zeros(SECOND), PROMPT_SAMPLE_RATE, 8_000)
    wave = torch.from_numpy(tone(SECOND))[None].requires_grad_()
    mel_spectrogram(resample(wave, PROMPT_SAMPLE_RATE, 8_000), config).sum().backward()
    assert wave.grad is not None and wave.grad.abs().sum() > 0


def test_a_saved_wave_is_read_back_within_one_16_bit_step_and_within_full_scale(tmp_path):
    wav = 3 * tone(1000, rate=SAMPLE_RATE)
    save_audio(tmp_path / "a.wav", wav, SAMPLE_RATE)
    info = sf.info(tmp_path / "a.wav")
    assert (info.samplerate, info.channels, info.subtype) == (SAMPLE_RATE, 1, "PCM_16")
    np.testing.assert_allclose(load_audio(tmp_path / "a.wav", SAMPLE_RATE), wav.clip(-1, 1), atol=1 / 16384)


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16000, 2), (44100, 2), (48000, 6)])
def test_a_file_of_any_rate_and_channel_count_becomes_mono_at_the_requested_rate(tmp_path, rate, channels):
    """Channels are averaged: only the first one has the tone."""
    others = [np.zeros(rate)] * (channels - 1)
    sf.write(tmp_path / "a.flac", np.stack([tone(rate, rate=rate), *others], axis=1), rate)
    loaded = channels * load_audio(tmp_path / "a.flac", PROMPT_SAMPLE_RATE)
    untrusted = channels * at_rate(load_untrusted((tmp_path / "a.flac").read_bytes()), PROMPT_SAMPLE_RATE)
    np.testing.assert_array_equal(untrusted, loaded)
    assert loaded.shape == (PROMPT_SAMPLE_RATE,)
    assert loaded.dtype == np.float32
    np.testing.assert_allclose(loaded[200:-200], tone(PROMPT_SAMPLE_RATE)[200:-200], atol=4e-3)


def test_a_file_that_is_not_audio_is_an_error_naming_it(tmp_path):
    (tmp_path / "words.wav").write_text("no audio at all")
    with pytest.raises(RuntimeError, match=r"words\.wav"):
        load_audio(tmp_path / "words.wav", PROMPT_SAMPLE_RATE)


def test_files_of_clients_have_limits_by_their_header_before_they_are_decoded(tmp_path, monkeypatch):
    sf.write(tmp_path / "a.wav", tone(int(30.1 * SECOND)), SECOND)
    data = (tmp_path / "a.wav").read_bytes()
    assert load_untrusted(data, max_seconds=31).seconds == 30.1
    with pytest.raises(ValueError, match="the recording is longer than 30 s"):
        load_untrusted(data)
    monkeypatch.setattr(sf.SoundFile, "read", lambda *_, **__: pytest.fail("decoded"))
    for rate, kind, channels, message in (
        (16_001, "WAV", 1, "sample rate is 16001"),
        (3_000, "WAV", 1, "is 3000"),
        (191_975, "WAV", 1, "is 191975"),  # of no whole part of it
        (8_000, "OGG", 64, "64 channels"),
        (8_000, "WAV", 9, "9 channels"),
        (8_000, "AIFF", 1, "format AIFF"),
    ):
        sf.write(tmp_path / "a", np.zeros((800, channels)), rate, format=kind)
        with pytest.raises(ValueError, match=message):
            load_untrusted((tmp_path / "a").read_bytes())


def test_the_memory_for_decoding_does_not_grow_with_the_number_of_channels(tmp_path):
    sf.write(tmp_path / "a.flac", np.zeros((20 * SECOND, 8)), SECOND)
    data = (tmp_path / "a.flac").read_bytes()
    tracemalloc.start()
    load_untrusted(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6  # 1.3 MB of samples and one block; the 8 channels would be 10 MB


MIB = 1 << 20


def has_the_tone(recording: Any) -> bool:
    """Whether the strongest band of the prompt's mel is that of the tone, as in the mel of a clean tone."""
    assert isinstance(recording, Recording)
    mel = reference_mel(recording, COSYVOICE3.mel_max_hz)[20:-20].mean(axis=0)  # (80,)
    config = MelConfig(max_hz=COSYVOICE3.mel_max_hz)
    clean = mel_spectrogram(torch.from_numpy(sine(TONE_HZ))[None], config)[0, :, 20:-20].mean(dim=1).numpy()
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
    assert folder.add(NewVoice(name="anna"), path.read_bytes()).seconds == 1
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
    sf.write(tmp_path / "tone.wav", sine(TONE_HZ, rate=rate), rate)
    assert has_the_tone(door(tmp_path / "tone.wav"))


def test_a_rate_of_16_khz_is_not_sent_so_that_upstreams_server_answers() -> None:
    assert "reference_sample_rate" not in Utterance("Hello.", sine(440, rate=PROMPT_SAMPLE_RATE)).arrays()


def test_without_a_rate_samples_are_16_khz_and_its_limits_count_seconds() -> None:
    assert received({"reference_wav": sine(440, rate=PROMPT_SAMPLE_RATE)}).rate == PROMPT_SAMPLE_RATE
    long = np.tile(sine(440, rate=48_000), 30)
    rate = np.array([48_000])
    assert received({"reference_wav": long, "reference_sample_rate": rate}).seconds == 30
    with pytest.raises(ValueError, match="lasts 30.00002 s at 48000 Hz"):
        received({"reference_wav": np.append(long, np.float32(0)), "reference_sample_rate": rate})


@pytest.mark.parametrize("rate", [-16_000, 0, 7_975, 48_025, 44_101, 192_000])
def test_a_rate_that_is_not_carried_is_refused_by_name(rate: int) -> None:
    with pytest.raises(ValueError, match=f"reference_sample_rate {rate} is not a multiple of 25 from 8000 to 48000"):
        received({"reference_wav": sine(440, rate=48_000), "reference_sample_rate": np.array([rate])})
    with pytest.raises(ValueError, match="reference_sample_rate 24000 without a reference_wav"):
        RequestRules().request("Hello.", reference_sample_rate=24_000)


def test_equal_samples_of_different_rates_are_different_recordings() -> None:
    wav = sine(440, rate=24_000)
    assert Recording(wav, rate=24_000).digest != Recording(wav).digest


def test_a_voice_registered_at_16_khz_works_and_says_how_to_get_its_upper_bands(tmp_path, caplog) -> None:
    from safetensors.numpy import load_file, save_file

    save_voice(tmp_path / "new.safetensors", Recording(sine(440, rate=24_000), "Hi.", 24_000))
    save_voice(tmp_path / "old.safetensors", Recording(sine(440, rate=16_000), "Hi."))
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
