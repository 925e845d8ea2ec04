"""Answers of the LLM that end by their length: continued, or cut short with a warning."""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import MAX_SEED, LLMPrompt, Sampling
from cosyvoice_triton.orchestrator.request import SynthesisRequest

from tests.support.fakes import FakeLM, Step, speech_request
from tests.support.pipeline import Pipeline, one_by_one


class CountingLM(FakeLM):
    """Continues 0, 1, 2, ... up to `total`. Requests that would need more than `context` tokens are rejected."""

    def __init__(self, total: int, context: int = 10_000):
        super().__init__()
        self.total = total
        self.context = context

    def script(self, prompt: LLMPrompt) -> Sequence[Step]:
        done, most = len(prompt.generated), self.samplings[-1].max_tokens
        assert list(prompt.generated) == list(range(done))
        if done + most > self.context:
            return [ValueError("the prompt is too long")]
        end = min(self.total, done + most)
        self.finish_reason = "stop" if end == self.total else "length"
        return [[token] for token in range(done, end)]


def speak(pipeline: Pipeline, request: SynthesisRequest) -> tuple[list[int], list[str]]:
    """The tokens that were spoken, and the warnings."""
    warnings: list[str] = []
    audio = pipeline.run(pipeline.synthesize(request, warnings.append))
    return np.concatenate(audio).astype(int).tolist(), warnings


def with_sampling(text: str = "hello", reference_text: str = "reference", **sampling: int) -> SynthesisRequest:
    return dataclasses.replace(speech_request(0, text, reference_text), sampling=Sampling(**sampling))


@pytest.mark.parametrize("reference_text", ["reference", ""])  # "": cross-lingual, the LLM gets no prompt tokens
@pytest.mark.parametrize("max_tokens", [7, 40, 80])
def test_an_answer_that_ends_by_its_length_is_continued_in_the_same_stream(max_tokens, reference_text) -> None:
    pipeline = Pipeline(CountingLM(80))
    request = with_sampling("hello, how are you today?", reference_text, max_tokens=max_tokens)
    assert speak(pipeline, request) == (list(range(80)), [])
    assert len(pipeline.token2wav.streams) == 1
    first, *later = pipeline.llm.prompts
    for index, prompt in enumerate(later, start=1):
        assert prompt == dataclasses.replace(first, generated=tuple(range(index * max_tokens)))


def test_a_loop_ends_at_twice_the_expected_duration_and_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    text = "字" * 90  # 18 s: longer segments do not occur
    with caplog.at_level(logging.WARNING):
        tokens, (warning,) = speak(Pipeline(CountingLM(5000)), with_sampling(text))
    assert len(tokens) == 25 * (2 * 18 + 2)
    assert warning == f"speech was cut short after 950 tokens, the most for a text of its length: {text[:80]!r}"
    assert warning in caplog.text


def test_an_answer_that_the_ratio_of_lengths_ends_is_not_continued() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(20), finish_reason="length"))  # fewer tokens than asked for
    tokens, (warning,) = speak(pipeline, speech_request())
    assert len(tokens) == 20 and len(pipeline.llm.prompts) == 1
    assert warning.startswith("speech was cut short after 20 tokens") and warning.endswith("'hello'")


def test_an_answer_that_the_llm_cannot_continue_is_spoken_with_a_warning() -> None:
    tokens, (warning,) = speak(Pipeline(CountingLM(80, context=50)), with_sampling(max_tokens=20))
    assert tokens == list(range(40))
    assert "cut short after 40 tokens, because the LLM cannot continue it (the prompt is too long)" in warning


def test_a_rejected_first_request_and_an_llm_that_fails_while_it_continues_are_errors() -> None:
    class Failing(CountingLM):
        def script(self, prompt: LLMPrompt) -> Sequence[Step]:
            return [UnavailableError("the LLM is down")] if prompt.generated else super().script(prompt)

    with pytest.raises(ValueError, match="too long"):
        speak(Pipeline(CountingLM(80, context=50)), with_sampling())
    with pytest.raises(UnavailableError, match="the LLM is down"):
        speak(Pipeline(Failing(80)), with_sampling(max_tokens=20))


def test_each_part_of_an_answer_has_its_own_seed_and_its_share_of_the_limits() -> None:
    pipeline = Pipeline(CountingLM(50))
    speak(pipeline, with_sampling(max_tokens=20, min_tokens=15, seed=MAX_SEED - 10))
    parts = [(part.seed, part.min_tokens, part.max_tokens) for part in pipeline.llm.samplings]
    assert parts == [(MAX_SEED - 10, 15, 20), (9, 0, 20), (29, 0, 20)]
    pipeline = Pipeline(CountingLM(50))
    speak(pipeline, with_sampling(max_tokens=20))
    assert [part.seed for part in pipeline.llm.samplings] == [None] * 3


@pytest.mark.parametrize(("max_tokens", "spoken"), [(1, [1]), (30, [20, 10]), (20, [20])])
def test_max_tokens_of_a_request_limits_the_whole_answer(max_tokens: int, spoken: list[int]) -> None:
    pipeline = Pipeline(CountingLM(20))
    request = with_sampling("one|two", max_tokens=max_tokens)
    tokens, warnings = speak(pipeline, dataclasses.replace(request, max_tokens=max_tokens))
    assert tokens == [token for count in spoken for token in range(count)]
    left_out = [f"max_tokens {max_tokens} was reached before 'two'"] if len(spoken) == 1 else []
    cut = [f"{spoken[-1]} tokens, what max_tokens of the request allows: "] if spoken[-1] < 20 else []
    assert len(warnings) == len(left_out + cut)
    assert all(words in warning for words, warning in zip(cut + left_out, warnings, strict=True))
