"""The python backend of `tensorrt_llm`: its model.py loaded as Triton does, with the real CPU engine."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LLMPrompt, TokenChunk

from tests.conftest import ROOT, initialized_model
from tests.support.fake_triton import InferenceRequest, TritonError
from tests.support.waiting import until

MAX_REQUESTS = 8


@contextmanager
def serving(genai_dir: Path, decoupled: bool):
    path = ROOT / "model_repo" / "tensorrt_llm" / "1" / "model.py"
    model = initialized_model(path, decoupled, gpt_model_path=str(genai_dir), max_requests=str(MAX_REQUESTS))
    yield model
    model.finalize()


@pytest.fixture(scope="module")
def decoupled_model(genai_dir):
    with serving(genai_dir, decoupled=True) as model:
        yield model


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return tokenizer.encode_prompt(LLMPrompt("Hello")).tolist()


def send(model, input_ids, *, decoupled=True, request_id="", parameters=None, **tensors) -> InferenceRequest:
    """Send a request to the model as Triton does; tensors that are None are omitted."""
    kinds = {"streaming": bool, "stop": bool} | dict.fromkeys(("random_seed", "seed"), np.uint64)
    kinds |= dict.fromkeys(("temperature", "runtime_top_p", "repetition_penalty"), np.float32)
    tensors = {"request_output_len": 200, "streaming": decoupled, "random_seed": 1} | tensors
    inputs = {
        name: np.array([value], kinds.get(name, np.int32)) for name, value in tensors.items() if value is not None
    }
    inputs["input_ids"] = np.array([input_ids], np.int32)
    request = InferenceRequest.from_client(inputs, decoupled=decoupled, request_id=request_id, parameters=parameters)
    assert model.execute([request]) is None
    return request


def finished(request):
    until(lambda: request.sender.final)
    return request.sender.responses


def tokens_of(request) -> list[list[int]]:
    groups = []
    for response in finished(request):
        outputs = response.arrays()
        assert outputs["output_ids"].shape[:2] == (1, 1)
        assert outputs["sequence_length"].tolist() == [[outputs["output_ids"].shape[2]]]
        groups.append(outputs["output_ids"][0, 0].tolist())
    return groups


def error_of(request):
    (response,) = finished(request)
    return response.error()


def test_streaming_returns_the_tokens_of_the_whole_answer_a_few_at_a_time(
    decoupled_model, genai_dir, tokenizer, prompt
):
    streamed = tokens_of(send(decoupled_model, prompt))
    (at_once,) = tokens_of(send(decoupled_model, prompt, streaming=False))
    with serving(genai_dir, decoupled=False) as plain_model:
        (plain,) = tokens_of(send(plain_model, prompt, decoupled=False))
        error = error_of(send(plain_model, [1, 2, 3], decoupled=False, streaming=True))
    assert "without decoupled responses" in error.message()
    assert all(len(group) == 3 for group in streamed[:-1]) and 1 <= len(streamed[-1]) <= 3
    assert [token for group in streamed for token in group] == at_once == plain
    assert at_once[-1] in tokenizer.end_ids


def test_a_cancelled_request_ends_and_frees_its_capacity(decoupled_model, prompt):
    endless = {"request_output_len": 3000, "min_length": 3000}
    request = send(decoupled_model, prompt, **endless)
    until(lambda: request.sender.responses)
    request.sender.cancelled = True
    assert finished(request)[-1].error().code() == TritonError.CANCELLED
    assert len(request.sender.responses) < 1000
    until(lambda: decoupled_model.engine.live == 0)


def test_a_request_with_stop_ends_the_live_request_with_its_id(decoupled_model, tokenizer, prompt):
    request = send(decoupled_model, prompt, request_id="a", request_output_len=3000, min_length=3000)
    other = send(decoupled_model, prompt, request_id="b")
    until(lambda: request.sender.responses)
    assert finished(send(decoupled_model, prompt, request_id="a", stop=True)) == []
    assert not any(response.has_error() for response in finished(request))
    assert tokens_of(other)[-1][-1] in tokenizer.end_ids
    until(lambda: decoupled_model.engine.live == 0)
    assert finished(send(decoupled_model, prompt, request_id="a", stop=True)) == []  # already ended: not an error


def failing_after(tokens):
    async def generate(request):
        for token in tokens:
            yield TokenChunk([token])
        raise UnavailableError("the LLM engine failed")

    return generate


def test_a_failure_ends_an_answer_with_an_error(decoupled_model, monkeypatch):
    monkeypatch.setattr(decoupled_model.engine, "generate", failing_after([7, 8, 9, 10]))
    first, last = finished(send(decoupled_model, [1, 2, 3]))
    assert first.arrays()["output_ids"].tolist() == [[[7, 8, 9]]] and first.arrays()["sequence_length"] == [[3]]
    assert last.error().code() == TritonError.UNAVAILABLE
    assert error_of(send(decoupled_model, [1, 2, 3], streaming=False)).code() == TritonError.UNAVAILABLE


def test_two_live_requests_cannot_share_an_id(decoupled_model, prompt):
    first = send(decoupled_model, prompt, request_id="a", min_length=100)
    assert "'a' is in use" in error_of(send(decoupled_model, prompt, request_id="a")).message()
    assert sum(map(len, tokens_of(first))) > 100


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"request_output_len": None}, "request_output_len is missing"),
        ({"request_output_len": 0}, "max_tokens 0 is out of range: 1..3000"),
        ({"input_lengths": 0}, "input_lengths 0 is outside 1..4"),
        ({"runtime_top_p": 1.5}, "top_p 1.5 is out of range: above 0, up to 1"),
        ({"temperature": [1.0, 2.0]}, "temperature must hold one value, not 2"),
        ({"min_length": 201}, "min_tokens 201 is out of range: 0..200"),
        ({"beam_width": 2}, "beam_width 2 is not supported"),
        ({"bad_words_list": [[1], [1]]}, "bad_words_list is not supported"),
        ({"stop": True}, "the request id is empty"),
        ({"end_id": 2**31 - 1}, "end_id holds 2147483647, outside the vocabulary"),
        ({"seed": 2**64 - 1}, "seed 18446744073709551615 is out of range"),
        ({"parameters": {"urgent_tokens": "-1"}}, "urgent_tokens -1 is out of range: 0..3000"),
        ({"parameters": {"urgent_tokens": "9" * 5000}}, "urgent_tokens must be a number"),
        ({"parameters": {"ras_window": "65"}}, "ras_window 65 is out of range"),
    ],
)
def test_bad_input_is_an_error_that_names_the_value(decoupled_model, tensors, message):
    error = error_of(send(decoupled_model, [1, 2, 3, 4], **tensors))
    assert error.code() == TritonError.INVALID_ARG
    assert message in error.message()


def test_repetition_aware_sampling_is_set_by_request_parameters(decoupled_model, prompt):
    narrow = {"runtime_top_k": 1, "repetition_penalty": 1.0, "request_output_len": 60, "min_length": 60}
    (looping,) = tokens_of(send(decoupled_model, prompt, streaming=False, **narrow))
    ras = {"ras_window": "10", "ras_tau": "0.1"}
    (free,) = tokens_of(send(decoupled_model, prompt, streaming=False, parameters=ras, **narrow))
    assert looping[:2] == free[:2] and looping != free


def test_ids_after_input_lengths_are_ignored(decoupled_model, prompt):
    padded = send(decoupled_model, prompt + [0] * 7, input_lengths=len(prompt))
    assert tokens_of(padded) == tokens_of(send(decoupled_model, prompt))
