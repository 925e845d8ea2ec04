"""What is found to be no speech, and when an answer is made again; silence that is cut, kept and made.
tests/demo_voice has the figures of real answers."""

import dataclasses
import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.audible import LEAD_SECONDS, TAIL_SECONDS
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED, VOICES_DIR
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.orchestrator.chunking import WITHHELD_TOKENS, Hop, HopSchedule
from cosyvoice_triton.orchestrator.judges import LEADING_SILENCE, AudioJudge, Reason, is_other_voice, judge_tokens
from cosyvoice_triton.orchestrator.report import Events
from cosyvoice_triton.orchestrator.request import RequestRules
from cosyvoice_triton.orchestrator.synthesis import SENTENCE_PAUSE
from cosyvoice_triton.orchestrator.token_buffer import SilenceFilter
from cosyvoice_triton.voice.audio import at_rate, load_recording
from cosyvoice_triton.voice.prompt import Prompt
from hypothesis import given
from hypothesis import strategies as st

from tests.orchestrator.test_request import text
from tests.support.fakes import FakeLM, FakeToken2Wav, FakeToken2WavStream, Step, speech_request
from tests.support.pipeline import Pipeline
from tests.support.streams import GOLDEN3
from tests.support.waiting import Clock

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


def test_a_text_in_pieces_is_never_made_again() -> None:
    pipeline, audio, warnings = speak(FakeLM(sum(LOOP, [])), pieces=text(pieces="a word", end=True))  # type: ignore[arg-type]
    assert set(audio) == {7} and pipeline.synthesizer.judged["loop", True] == 0
    assert warnings == ["the speech may be wrong, the same speech tokens are repeated: 'a word'"]


def test_an_answer_in_another_voice_is_found_in_whole_answers_of_registered_voices() -> None:
    assert is_other_voice(np.array([1.0, 0.0]), np.array([0.42, 0.9]))
    assert not is_other_voice(np.array([1.0, 0.0]), np.array([0.7, 0.7]))


def test_leading_silence_of_official_answers_is_not_bad() -> None:
    assert LEADING_SILENCE == 2 * TOKEN_RATE
    _, audio, warnings = speak(FakeLM([1] * 30 + list(range(10, 30))))
    assert audio == [1, *range(10, 30)] and not warnings


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([9, 1, 1, 1, 1, 1, 8], [9, 1, 1, 1, 1, 1, 8]),  # five are spoken
        ([9, 1, 1, 1, 1, 1, 1, 8], [9, 1, 1, 1, 1, 1, 8]),
        ([1, 2, 1, 2, 1, 2, 1, 8], [1, 2, 1, 2, 1, 8]),  # a run at the start, of several tokens
        ([9, 2, 2, 2, 2, 2, 2, 2], [9, 2, 2, 2, 2, 2]),  # at the end
        ([1] * 7 + [9] + [2] * 7, [1] * 5 + [9] + [2] * 5),  # any other token begins a new count
        ([1] * 13, [1] * 5),  # nothing else
    ],
)
def test_of_a_run_of_silent_tokens_the_first_five_are_kept(tokens: list[int], kept: list[int]) -> None:
    assert SilenceFilter(SILENT).kept(tokens) == kept


def test_cosyvoice3_has_upstreams_silent_tokens_and_only_it() -> None:
    upstreams = json.loads((GOLDEN3 / "item5b_cosyvoice3_silent_tokens.json").read_text())
    assert stacks.COSYVOICE3.silent_tokens == set(upstreams["silent_tokens"])
    assert [stack.name for stack in stacks.BUILT_IN if stack.silent_tokens] == ["cosyvoice3"]


@given(st.lists(st.sampled_from([1, 2, 3]), max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_the_grouping_of_arrivals_changes_nothing(tokens: list[int], cuts: list[int]) -> None:
    at, arriving = [0, *sorted(cuts), len(tokens)], SilenceFilter(SILENT)
    parts = [tokens[begin:end] for begin, end in zip(at, at[1:], strict=False)]
    assert [token for part in parts for token in arriving.kept(part)] == SilenceFilter(SILENT).kept(tokens)


def test_dropped_tokens_reach_no_chunk_and_every_segment_counts_anew() -> None:
    """A chunk is due after 18 tokens: the 18th that is spoken here, not the 18th that arrives."""
    arrivals = [[1, 1, 1], [1, 1, 1, 1], *[[9]] * 12, [7] * 8, [1, 1]]
    pipeline = Pipeline(FakeLM(*arrivals), long_silence=SILENT)
    audio = pipeline.run(pipeline.synthesize(speech_request(text="one|two")))
    spoken = [1] * 5 + [9] * 12 + [7] * 8 + [1] * 2
    assert [len(waveform) for waveform in audio] == [15, 12] * 2
    np.testing.assert_array_equal(np.concatenate(audio), spoken * 2)
    pipeline.run(pipeline.offline(speech_request(text="one")))
    assert pipeline.token2wav.offline_calls == [(spoken, 1.0)]


SPEAKS = [[1, 2, 1, 2, 2, 1, 1], *[[9]] * 30, [1, 1]]


@pytest.mark.parametrize(("trim", "first"), [(True, [1] + [9] * 15), (False, [1, 2, 1, 2, 2, 1, 1] + [9] * 8)])
def test_leading_silence_is_dropped_before_the_first_hop_is_counted(trim: bool, first: list[int]) -> None:
    """So the first chunk has as much sound as a hop has tokens, and its onset's context beside it."""
    pipeline = Pipeline(FakeLM(*SPEAKS), silent_tokens=SILENT)
    request = dataclasses.replace(speech_request(text="one|two"), trim_silence=trim)
    audio = pipeline.run(pipeline.synthesize(request))
    np.testing.assert_array_equal(audio[0], first)
    spoken = [1] * trim + [1, 2, 1, 2, 2, 1, 1] * (not trim) + [9] * 30 + [1, 1]
    assert np.concatenate(audio).tolist() == (spoken) * 2
    prompt = pipeline.llm.prompts[0]
    assert prompt.urgent_tokens == len(first) + LOOKAHEAD_TOKENS
    assert set(prompt.silent_tokens) == (SILENT if trim else set())
    pipeline.run(pipeline.offline(request))
    assert pipeline.token2wav.offline_calls == [(spoken, 1.0)] * 2


def test_an_answer_of_silent_tokens_alone_has_the_last_of_them() -> None:
    pipeline = Pipeline(FakeLM([1] * 39, [2]), silent_tokens=SILENT)
    assert [waveform.tolist() for waveform in pipeline.run()] == [[2]]


class Quiet(FakeToken2Wav):
    """Its audio is a token's 40 ms: silence for tokens up to 3, of which 3 is not known to be silent."""

    @staticmethod
    def sound(tokens: Sequence[int]) -> np.ndarray:
        heard = np.repeat([token > 3 for token in tokens], SAMPLE_RATE // TOKEN_RATE)
        return np.where(heard, 1 - np.arange(heard.size) % 2 * 2, 0).astype(np.float32)

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float) -> np.ndarray:
        return self.sound(tokens)

    def open(self, speed: float = 1.0) -> FakeToken2WavStream:
        stream = super().open(speed)
        render = stream.render

        async def rendered(tokens: Sequence[int], hop: Hop, audio_left: float | None = None) -> np.ndarray:
            await render(tokens, hop, audio_left)
            withheld = 0 if hop.final else WITHHELD_TOKENS
            return self.sound(tokens[max(0, hop.offset - WITHHELD_TOKENS) : hop.offset + hop.length - withheld])

        stream.render = rendered  # type: ignore[method-assign]
        return stream


@pytest.mark.parametrize("whole", [False, True])
def test_without_trimming_an_answer_is_what_token2wav_renders_of_what_the_llm_says(whole: bool) -> None:
    tokens = [1] * 9 + [3] * 8 + [9] * 60 + [3] * 20
    pipeline = Pipeline(FakeLM(tokens), token2wav=Quiet(), silent_tokens=SILENT)
    heard = {}
    for trim in (False, True):
        request = dataclasses.replace(speech_request(text="one"), trim_silence=trim)
        heard[trim] = np.concatenate(pipeline.run((pipeline.offline if whole else pipeline.synthesize)(request)))
    np.testing.assert_array_equal(heard[False], Quiet.sound(tokens))
    seconds = LEAD_SECONDS + 60 / TOKEN_RATE + TAIL_SECONDS
    assert heard[True].size / SAMPLE_RATE == pytest.approx(seconds, abs=0.03)


def test_after_a_cut_token2wav_is_told_what_the_listener_has_and_the_second_chunk_counts_as_late(monkeypatch) -> None:
    """Of 0.44 s of audio 0.15 are left, as the next chunk, the schedule and the choice of short first hops know."""
    cuts: list[float] = []
    monkeypatch.setattr(HopSchedule, "cut", lambda schedule, seconds: cuts.append(seconds))
    clock = Clock()
    pipeline = Pipeline(FakeLM([1] * 9 + [3] * 8 + [9] * 60), token2wav=Quiet(), clock=clock, silent_tokens=SILENT)
    opened = pipeline.synthesizer._first_hops
    audio = pipeline.run()
    seconds = [len(waveform) / SAMPLE_RATE for waveform in audio]
    assert seconds[0] == pytest.approx(0.12 + 0.03, abs=0.02)
    assert cuts == [pytest.approx(12 / TOKEN_RATE - seconds[0])]
    assert pipeline.token2wav.streams[0].lefts == [None, pytest.approx(seconds[0]), None]
    (counted,) = opened._seconds
    assert counted == pytest.approx(9 / TOKEN_RATE - seconds[0] + 2 / TOKEN_RATE, abs=0.001)


def test_between_segments_there_is_a_pause_where_a_sentence_ends() -> None:
    """What the LLM made there is cut. A pause of the text takes its place."""
    pauses: list[int] = []
    pipeline = Pipeline(FakeLM([9] * 3), silent_tokens=SILENT)

    async def speak(trim: bool) -> list[np.ndarray]:
        request = dataclasses.replace(speech_request(text="one.|two|three"), trim_silence=trim)
        stream = pipeline.synthesizer.stream(
            request, Events(segment=lambda text, samples, tokens: pauses.append(0 if text else samples))
        )
        return [waveform async for waveform in stream]

    pipeline.run(speak(True))
    assert pauses == [0, round(SENTENCE_PAUSE * SAMPLE_RATE), 0, 0]
    pauses.clear()
    pipeline.run(speak(False))
    assert pauses == [0, 0, 0]
