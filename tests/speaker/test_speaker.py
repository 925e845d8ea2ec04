"""The library: a stack in this process, with the checkpoint of random weights, beside the same stack on a server."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton import Client, Speaker, samples
from cosyvoice_triton.cli import say
from cosyvoice_triton.constants import HOP_SAMPLES, SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.voice.audio import load_audio, save_audio

from tests.support.server_requests import VOICE as RECORDING
from tests.support.server_requests import VOICE_TEXT, Serve
from tests.support.waiting import until

STREAMS = 2
SETTINGS = {"max_streams": str(STREAMS), "flow_precision": "float32", "sampling": "triton", "profile": "unlimited"}
VOICE = {"reference": RECORDING, "reference_text": VOICE_TEXT, "seed": 3}
TEXT = "Good morning."


@pytest.fixture(scope="module")
def speaker(demo_models: Path) -> Iterator[Speaker]:
    with Speaker(demo_models, device="cpu", settings=SETTINGS) as made:
        yield made


def streams(speaker: Speaker) -> int:
    return sum(speaker._pipeline.synthesizer.token2wav.live.values())  # type: ignore[attr-defined]


def test_a_text_is_streamed_in_chunks_of_the_length_of_the_whole(speaker: Speaker) -> None:
    chunks = list(speaker.stream(TEXT, **VOICE))
    assert len(chunks) > 1 and all(chunk.dtype == np.float32 and chunk.ndim == 1 for chunk in chunks)
    assert speaker.speak(TEXT, **VOICE).size == sum(chunk.size for chunk in chunks)
    assert speaker.sample_rate == SAMPLE_RATE
    fast = speaker.speak(TEXT, **VOICE, speed=2.0).size
    assert fast == pytest.approx(sum(map(len, chunks)) / 2, rel=0.05)
    assert sum(map(len, speaker.stream(TEXT, **VOICE, speed=2.0))) == pytest.approx(fast, abs=2 * HOP_SAMPLES)


def test_speech_is_converted_to_a_voice_whole_and_while_it_is_spoken(speaker: Speaker, tmp_path: Path) -> None:
    """Its audio is what token2wav makes of the tokens that its own tokenizer gives."""
    voice = {"reference": VOICE["reference"]}
    save_audio(tmp_path / "source.wav", load_audio(samples.FOLDER / "reference_zh.wav", SAMPLE_RATE), SAMPLE_RATE)
    source = load_audio(tmp_path / "source.wav", SAMPLE_RATE)
    chunks = list(speaker.convert(tmp_path / "source.wav", **voice))
    tokens = -(-source.size // (SAMPLE_RATE // TOKEN_RATE))
    assert len(chunks) > 1 and sum(map(len, chunks)) == pytest.approx(tokens * SAMPLE_RATE / TOKEN_RATE, abs=2000)
    again = speaker.convert(source, source_sample_rate=SAMPLE_RATE, **voice)
    np.testing.assert_allclose(np.concatenate(list(again)), np.concatenate(chunks), atol=1e-4)

    live, heard = np.array_split(source, 20), list[int]()

    def microphone() -> Iterator[np.ndarray]:
        for number, piece in enumerate(live):
            heard.append(number)
            yield piece

    spoken = speaker.convert(microphone(), source_sample_rate=SAMPLE_RATE, **voice)
    assert sum(map(len, spoken)) == sum(map(len, chunks))
    with pytest.raises(ValueError, match="source_wav lasts 0.25 s"):
        list(speaker.convert(iter([source[:6_000]]), source_sample_rate=SAMPLE_RATE, **voice))
    assert say.main(["--local", "unused", "--source", "missing.wav"]) == 1


async def test_many_speak_at_once_also_in_loops_of_their_own(speaker: Speaker) -> None:
    expected = np.concatenate(list(speaker.stream(TEXT, **VOICE)))

    async def streamed() -> np.ndarray:
        return np.concatenate([chunk async for chunk in speaker.astream(TEXT, **VOICE)])

    whole, *parts = await asyncio.gather(speaker.aspeak(TEXT, **VOICE), streamed(), streamed())
    assert whole.size == expected.size
    for part in parts:
        np.testing.assert_allclose(part, expected, atol=1e-4)


def test_what_cannot_be_spoken_is_named_and_warnings_are_reported(speaker: Speaker) -> None:
    with pytest.raises(ValueError, match="unknown speaker 'nobody'"):
        speaker.speak(TEXT, voice="nobody")
    with pytest.raises(ValueError, match="request parameter 'tempo' is unknown"):
        list(speaker.stream(TEXT, **VOICE, tempo=2))
    warnings: list[str] = []
    assert speaker.speak(TEXT, **VOICE, max_tokens=9, on_warning=warnings.append).size
    assert "speech was cut short after 9 tokens" in warnings[0]


async def test_a_closed_iterator_and_a_cancelled_task_free_their_streams(speaker: Speaker) -> None:
    held = speaker.stream("Good morning. " * 8, **VOICE)
    next(held)
    assert streams(speaker) == 1
    held.close()
    until(lambda: streams(speaker) == 0)
    stream = speaker.astream("Good morning. " * 8, **VOICE)
    await anext(stream)
    await stream.aclose()
    speaking = asyncio.create_task(speaker.aspeak("Good morning. " * 8, **VOICE))
    await asyncio.sleep(0)
    speaking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await speaking
    until(lambda: streams(speaker) == 0)
    assert speaker.speak(TEXT, **VOICE).size


def test_a_listener_without_a_place_is_refused_as_by_a_server(speaker: Speaker) -> None:
    held = [speaker.stream("Good morning. " * 8, **VOICE) for _ in range(STREAMS)]
    for each in held:
        next(each)
    with pytest.raises(OverloadedError, match="listener"):
        next(speaker.stream(TEXT, **VOICE))
    for each in held:
        each.close()
    until(lambda: streams(speaker) == 0)


def test_leaving_the_block_ends_what_is_under_way(demo_models: Path) -> None:
    before = threading.active_count()
    with Speaker(demo_models, device="cpu", settings=SETTINGS) as speaker:
        held = speaker.stream("Good morning. " * 8, **VOICE)
        next(held)
        assert speaker.voices == sorted(speaker.voices)
    with pytest.raises(CancelledError):
        list(held)
    until(lambda: threading.active_count() <= before + 2)  # torch's own may stay
    with pytest.raises(ValueError, match="unknown setting 'max_stream'"):
        Speaker(demo_models, settings={"max_stream": "2"})
    with pytest.raises(ValueError, match=r"is missing; .*run: cosyvoice-triton prepare download"):
        Speaker(demo_models / "nothing")


@pytest.mark.server
def test_the_same_request_sounds_the_same_from_a_server_and_from_this_process(speaker: Speaker, serve: Serve) -> None:
    """Only the voice differs a little, which is sent in float16."""
    here = list(speaker.stream(TEXT, **VOICE))
    with Client(serve().grpc_url) as client:
        there = list(client.stream(TEXT, **VOICE))
    assert [chunk.size for chunk in here] == [chunk.size for chunk in there]
    spectra = [np.abs(np.fft.rfft(np.concatenate(chunks))) for chunks in (here, there)]
    assert np.corrcoef(*spectra)[0, 1] > 0.99


def test_say_speaks_without_a_server(demo_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--local", str(demo_models), "--reference", str(VOICE["reference"])]
    assert say.main([TEXT, *options, "--output", str(tmp_path / "a.wav")]) == 0
    (tmp_path / "a.srt").write_text("1\n00:00:00,500 --> 00:00:03,000\nThe train leaves at nine in the morning.\n")
    assert say.main([*options, "--subtitles", str(tmp_path / "a.srt"), "--output", str(tmp_path / "b.wav")]) == 0
    track = load_audio(tmp_path / "b.wav", SAMPLE_RATE)
    assert not track[: SAMPLE_RATE // 2].any() and track[SAMPLE_RATE // 2 :].any()
    assert (tmp_path / "a.wav").stat().st_size > 10_000
    assert say.main([*options, "--subtitles", str(tmp_path / "a.srt"), "--duration", "2"]) == 1
    assert "--subtitles comes instead of a text, --source and --duration" in capsys.readouterr().err
