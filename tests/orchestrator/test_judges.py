"""What is found to be no speech, and when an answer is made again. tests/demo_voice has the figures of real answers."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from cosyvoice_triton import samples
from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED, VOICES_DIR
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.orchestrator.judges import LEADING_SILENCE, AudioJudge, Reason, is_other_voice, judge_tokens
from cosyvoice_triton.orchestrator.request import RequestRules
from cosyvoice_triton.voice.audio import at_rate, load_recording

from tests.support.fakes import FakeLM, Step, speech_request
from tests.support.pipeline import Pipeline

SILENT = frozenset({1, 2})
TEXT = "The weather is nice today and we are going to the park."  # 3.3 s
SPEECH = np.random.default_rng(0).integers(10, 6000, 70).tolist()
RECORDINGS = [*sorted(samples.FOLDER.glob("*.wav")), *sorted((TRAINED / VOICES_DIR).glob("*.wav"))]


@pytest.mark.parametrize(
    ("tokens", "ended", "reason"),
    [
        (SPEECH, True, None),
        ([1] * 20 + SPEECH + [2] * 20, True, None),
        ([1, 2] * 25, False, "silence"),
        (SPEECH[:20] + [2] * 100, False, "silence"),
        (SPEECH[:20] + [7] * 15, False, "loop"),
        (SPEECH[:20] + [7] * 9 + SPEECH[20:], False, None),
        (SPEECH[:20] + [7, 1, 8, 9] * 16, False, "loop"),
        (SPEECH[:40] * 2, False, None),  # a word said again
        (SPEECH[:20] * 4, False, "loop"),
        (SPEECH[:30], True, "length"),
        (SPEECH[:30], False, None),
        (SPEECH + [t + 1 for t in SPEECH] + [t + 2 for t in SPEECH] + [t + 3 for t in SPEECH], False, "length"),
    ],
)
def test_tokens_that_are_no_speech_of_the_text(tokens: list[int], ended: bool, reason: Reason | None) -> None:
    assert judge_tokens(tokens, SILENT, TEXT, ended) == reason


def judged(wave: np.ndarray, first: float = 0.44, *, open_ended: bool = False) -> Reason | None:
    """What is found in a first chunk of so many seconds and the rest."""
    judge, at = AudioJudge(), round(first * SAMPLE_RATE)
    found = judge.judge(wave[:at], final=False)
    return found or judge.judge(wave[at:], final=True, open_ended=open_ended)


def hum(seconds: float) -> np.ndarray:
    times = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return sum(0.05 / n * np.sin(2 * np.pi * 100 * n * times) for n in range(1, 16)).astype(np.float32)  # type: ignore[union-attr]


def noise(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, round(seconds * SAMPLE_RATE)).astype(np.float32)


def rumble(seconds: float) -> np.ndarray:
    """Brown noise, which is quiet in most bands."""
    wave = np.cumsum(noise(seconds))
    return (0.06 * (wave - wave.mean()) / wave.std()).astype(np.float32)


def tone(seconds: float) -> np.ndarray:
    return 0.1 * np.sin(np.arange(round(seconds * SAMPLE_RATE)) * 0.1).astype(np.float32)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_in_recordings_nothing_is_found_but_what_is_put_in(path: object) -> None:
    speech = np.array(at_rate(load_recording(path), SAMPLE_RATE))  # type: ignore[arg-type]
    assert judged(speech) is None
    for put in (hum, noise, rumble, tone):
        assert judged(np.concatenate([speech[:30_000], put(1.0), speech[30_000:]])) == "steady"
    assert judged(1e-4 * speech) == "silence"
    assert judged(np.clip(100 * speech, -0.99, 0.99)) == "clipped"
    loud = np.argmax(np.abs(speech[30_000:60_000])) + 30_000
    assert judged(speech[:loud], open_ended=True) == "cut"
    assert judged(np.concatenate([speech, np.zeros(4000, np.float32)]), open_ended=True) is None


@pytest.mark.parametrize("put", [hum, noise, tone])
def test_a_first_chunk_is_enough(put: Callable[[float], np.ndarray]) -> None:
    assert AudioJudge().judge(put(0.44), final=False) == "steady"
    assert AudioJudge(speed=0.5).judge(put(0.44), final=False) is None  # a vowel may last as long


class OneBadAnswer(FakeLM):
    """Its first answer, of each text, is another one than the others."""

    def __init__(self, bad: list[Step], good: list[Step], count: int = 1) -> None:
        super().__init__()
        self.answers = [bad] * count + [good] * 9

    def script(self, prompt: LLMPrompt) -> list[Step]:
        return self.answers[len(self.prompts) - 1]


GOOD: list[Step] = [[token] for token in range(10, 30)]
LOOP: list[Step] = [[7]] * 60
DEAD: list[Step] = [[1]] * 200


def speak(llm: FakeLM, *, offline: bool = False, **fields: object) -> tuple[Pipeline, list[float], list[str]]:
    """The pipeline, its audio, and the warnings."""
    pipeline, warnings = Pipeline(llm, silent_tokens=SILENT, judges=True), []
    request = dataclasses.replace(speech_request(text="a word"), **{"retry_bad_answers": True, **fields})  # type: ignore[arg-type]

    speech = (pipeline.offline if offline else pipeline.synthesize)(request, warnings.append)
    return pipeline, np.concatenate(pipeline.run(speech)).tolist(), warnings


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(("bad", "reason"), [(LOOP, "loop"), (DEAD, "silence")], ids=["loop", "silence"])
def test_an_answer_that_begins_badly_is_made_again_before_anything_is_sent(bad, reason, offline) -> None:
    pipeline, audio, warnings = speak(OneBadAnswer([[*sum(bad, [])]] if offline else bad, GOOD), offline=offline)
    assert audio == list(range(10, 30)) and not warnings
    assert pipeline.synthesizer.judged[reason, True] == 1 and len(pipeline.llm.prompts) == 2
    if not offline and bad is LOOP:
        assert [stream.restarts for stream in pipeline.token2wav.streams] == [1]


def test_an_answer_that_is_bad_twice_is_sent_with_a_warning() -> None:
    pipeline, audio, warnings = speak(OneBadAnswer([sum(LOOP, [])], GOOD, count=2))  # type: ignore[arg-type]
    assert audio == [7] * 60 and len(pipeline.llm.prompts) == 2
    assert warnings == ["the speech may be wrong, the same speech tokens are repeated: 'a word'"]
    assert pipeline.synthesizer.judged["loop", True] == pipeline.synthesizer.judged["loop", False] == 1


def test_what_is_found_after_audio_was_sent_is_a_warning_before_the_end() -> None:
    _, audio, warnings = speak(FakeLM(*([token] for token in range(10, 35)), *LOOP[:20]))
    assert len(audio) == 45 and warnings == ["the speech may be wrong, the same speech tokens are repeated: 'a word'"]


def test_a_request_that_is_repeatable_is_made_again_only_if_it_asks() -> None:
    rules = RequestRules()
    for parameters, again in (({}, True), ({"seed": 3}, False), ({"seed": 3, "retry_bad_answers": True}, True)):
        assert rules.request("Hi.", parameters=parameters).retry_bad_answers == again  # type: ignore[arg-type]
    pipeline, _, warnings = speak(OneBadAnswer([sum(LOOP, [])], GOOD), sampling=Sampling(seed=3))  # type: ignore[arg-type]
    assert [sampling.seed for sampling in pipeline.llm.samplings] == [3, 4] and not warnings
    _, audio, warnings = speak(OneBadAnswer([sum(LOOP, [])], GOOD), retry_bad_answers=False)  # type: ignore[arg-type]
    assert audio == [7] * 60 and len(warnings) == 1


def test_an_answer_in_another_voice_is_found_in_whole_answers_of_registered_voices() -> None:
    assert is_other_voice(np.array([1.0, 0.0]), np.array([0.42, 0.9]))
    assert not is_other_voice(np.array([1.0, 0.0]), np.array([0.7, 0.7]))


def test_leading_silence_of_official_answers_is_not_bad() -> None:
    assert LEADING_SILENCE == 2 * TOKEN_RATE
    _, audio, warnings = speak(FakeLM([1] * 30 + list(range(10, 30))))
    assert audio == [1, *range(10, 30)] and not warnings
