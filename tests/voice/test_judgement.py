"""Recordings are judged, and their ends mended, before they are encoded."""

from dataclasses import replace

import numpy as np
import pytest
from cosyvoice_triton import samples
from cosyvoice_triton.demo_checkpoint import TRAINED, VOICES_DIR
from cosyvoice_triton.load.samples import read_manifest
from cosyvoice_triton.voice.judgement import judge
from cosyvoice_triton.voice.prompt import Recording
from cosyvoice_triton.voice.recordings import parse_recording

from tests.support.fakes import FakeLM, speech_request
from tests.support.pipeline import Pipeline

RATE = 24_000
TEXT = "It takes about two seconds to say so."


def silence(seconds: float) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 1e-4, round(seconds * RATE)).astype(np.float32)


def speech(seconds: float = 2.0, peak: float = 0.5) -> np.ndarray:
    """Syllables of 0.2 s that swell and fade to silence."""
    at = np.arange(round(seconds * RATE)) / RATE
    return (peak * np.sin(2 * np.pi * 150 * at) * np.sin(np.pi * at / 0.2) ** 2).astype(np.float32)


def recording(*parts: np.ndarray, text: str = TEXT) -> Recording:
    return Recording(np.concatenate(parts), text, RATE)


GOOD = recording(silence(0.1), speech(), silence(0.15))


@pytest.mark.parametrize(
    ("bad", "warning"),
    [
        (recording(silence(0.1), speech(2.0)[: round(1.92 * RATE)]), "ends inside a word"),
        (recording(silence(0.9), speech(), silence(0.15)), "has 0.9 s of silence at its beginning"),
        (recording(silence(0.1), speech(), silence(1.2)), "has 1.2 s of silence at its end"),
        (replace(GOOD, wav=(3 * GOOD.wav).clip(-1, 1)), "is clipped in"),
        (replace(GOOD, wav=GOOD.wav / 100), "is quiet, -"),
        (replace(GOOD, text=4 * TEXT), "speaks for 2."),
        (replace(GOOD, text="It."), "speaks for 2."),
    ],
    ids=["cut", "late", "long", "clipped", "quiet", "long transcript", "short transcript"],
)
def test_each_fault_has_one_warning_that_says_what_to_do(bad: Recording, warning: str) -> None:
    (found,) = judge(bad).warnings
    assert found.startswith(f"the recording {warning}") and ": " in found


def test_cuts_inside_words_are_found_wherever_they_are_and_pauses_are_no_cuts() -> None:
    """Of each recording the first seconds to every 10 ms, by what is on both sides of the cut."""
    found, pauses = [], []
    for path in (*(TRAINED / VOICES_DIR).glob("*.wav"), *samples.FOLDER.glob("*.wav")):
        whole = parse_recording(path.read_bytes())
        frame = whole.rate // 100
        frames = whole.wav[: len(whole.wav) // frame * frame].reshape(-1, frame)
        levels = 20 * np.log10(np.sqrt(np.square(frames).mean(axis=1)) + 1e-7)
        speech, noise = np.percentile(levels, 95), np.percentile(levels, 5)
        for end in range(100, len(levels) - 3):
            abrupt = judge(replace(whole, wav=whole.wav[: end * frame])).abrupt
            if levels[end - 3 : end + 3].min() > max(speech - 15, noise + 10):
                found.append(abrupt)
            elif levels[end - 5 : end].max() < max(speech - 30, noise + 5):
                pauses.append(abrupt)
    assert np.mean(found) > 0.97 and len(found) > 900  # the others are in reference_zh, whose noise is loud
    assert not any(pauses) and len(pauses) > 100


def test_good_recordings_have_no_warning() -> None:
    assert judge(GOOD).warnings == [] == judge(replace(GOOD, text="")).warnings
    for path in (TRAINED / VOICES_DIR).glob("*.wav"):
        assert (
            judge(replace(parse_recording(path.read_bytes()), text=path.with_suffix(".txt").read_text())).warnings == []
        ), path
    for sample in read_manifest(samples.MANIFEST):
        assert sample.prompt_audio is not None
        assert judge(replace(sample.prompt_audio, text=sample.prompt_text)).warnings == [], sample.id


def test_silence_at_the_ends_is_cut_to_0_2_s() -> None:
    long = recording(silence(1.0), speech(), silence(0.7))
    judged = judge(long)
    assert (judged.leading, judged.trailing) == (pytest.approx(1.0, abs=0.03), pytest.approx(0.7, abs=0.03))
    assert judged.mended(long).seconds == pytest.approx(2.4, abs=0.06)
    assert judge(GOOD).mended(GOOD) is GOOD


def test_an_abrupt_end_gets_silence_within_the_limit_of_the_duration() -> None:
    cut = recording(speech(2.0)[: round(1.92 * RATE)])
    mended = judge(cut).mended(cut)
    assert mended.seconds == pytest.approx(cut.seconds + 0.2) and not mended.wav[-round(0.2 * RATE) :].any()
    longest = recording(speech(30.2)[round(0.28 * RATE) : round(30.12 * RATE)])
    assert judge(longest).mended(longest).seconds == 30


async def test_a_recording_warns_at_every_use_and_is_changed_only_if_the_request_asks() -> None:
    long = recording(silence(1.0), speech(), silence(0.7), text="It.")
    encoded: list[float] = []
    pipeline = Pipeline(FakeLM([1] * 40))
    tokens = pipeline.encoder.tokens

    async def noting(recording: Recording) -> np.ndarray:
        encoded.append(round(recording.seconds, 1))
        return await tokens(recording)

    pipeline.encoder.tokens = noting  # type: ignore[method-assign]
    warnings = list[str]()
    for trim in (False, False, True):
        await pipeline.offline(replace(speech_request(), voice=long, trim_reference=trim), warnings.append)
    assert encoded == [3.7, 2.4]
    assert len([each for each in warnings if "its transcript takes about" in each]) == 3 < len(warnings)
