"""The `tensorrt_llm` model: its client over a fake of Triton's response streams, and its model.py as Triton loads it,
with the real CPU engine."""

import asyncio
from contextlib import aclosing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling, Timeouts, TokenChunk
from cosyvoice_triton.llm.triton_client import TritonLM

from tests.conftest import ROOT, initialized_model
from tests.support.fake_triton import InferenceRequest, TritonError
from tests.support.waiting import until

QUICK = Timeouts(connect=0.1, first_token=0.1, token=0.1)
MAX_REQUESTS = 8


class ScriptedModel:
    """Answers from a script: token ids, an exception to raise, or a number of seconds or a future to wait for."""

    def __init__(self, *script):
        self.script = script
        self.requests = []
        self.parameters = []
        self.open_streams = 0

    async def ask(self, inputs, parameters):
        self.requests.append(inputs)
        self.parameters.append(parameters)
        self.open_streams += 1
        try:
            for answer in self.script:
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, (float, asyncio.Future)):
                    await (asyncio.sleep(answer) if isinstance(answer, float) else answer)
                else:
                    padded = np.array([[[*answer, 0]]], np.int32)
                    yield {"output_ids": padded, "sequence_length": np.array([[len(answer)]], np.int32)}
        finally:
            self.open_streams -= 1


def speak(model, tokenizer, generated=(), silent_tokens=(), **sampling):
    async def run():
        prompt = LLMPrompt("Hi", "Ref", (1,), generated=generated, silent_tokens=silent_tokens)
        async with aclosing(TritonLM(model, tokenizer, QUICK).generate(prompt, Sampling(**sampling))) as answer:
            chunks = [chunk async for chunk in answer]
        return [chunk.tokens for chunk in chunks if chunk.tokens], chunks[-1].finish_reason

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answers", "max_tokens", "expected"),
    [
        ([[1], [2, 3], ["end"]], 30, ([[1], [2, 3]], "stop")),
        ([[0], [0]], 2, ([[0], [0]], "length")),
        ([[0, "end"]], 2, ([[0]], "stop")),  # not a cut, although it is at max_tokens
    ],
)
def test_speech_ids_are_yielded_as_they_arrive_up_to_the_end(tokenizer, answers, max_tokens, expected):
    first, end = tokenizer.first_speech_id, tokenizer.end_ids[0]
    model = ScriptedModel(*[[end if token == "end" else first + token for token in answer] for answer in answers])
    assert speak(model, tokenizer, max_tokens=max_tokens) == expected
    assert model.open_streams == 0


def test_a_stream_that_does_not_end_after_its_last_token_ends_the_answer(tokenizer, monkeypatch, caplog):
    monkeypatch.setattr("cosyvoice_triton.llm.triton_client.CLOSE_SECONDS", 0.05)
    model = ScriptedModel([tokenizer.first_speech_id, tokenizer.end_ids[0]], 60.0)
    assert speak(model, tokenizer) == ([[0]], "stop")
    assert model.open_streams == 0 and "did not end its stream" in caplog.text


def test_the_request_carries_prompt_and_sampling_in_trt_llms_tensors(tokenizer):
    model = ScriptedModel([tokenizer.end_ids[0]])
    speak(model, tokenizer, seed=7, top_k=9, max_tokens=30)
    (inputs,) = model.requests
    prompt = tokenizer.encode_prompt(LLMPrompt("Hi", "Ref", (1,))).tolist()
    assert inputs["input_ids"].tolist() == [prompt]
    expected = {"input_lengths": len(prompt), "random_seed": 7, "runtime_top_k": 9, "request_output_len": 30}
    expected |= {"min_length": 4, "end_id": tokenizer.end_ids[0], "streaming": True}  # two per token of the text
    assert expected.items() <= {name: array.item() for name, array in inputs.items() if name != "input_ids"}.items()
    assert all(array.shape[0] == 1 for array in inputs.values())


def test_an_answer_is_continued_after_its_tokens_and_within_the_limits_of_the_whole(tokenizer):
    model = ScriptedModel([tokenizer.end_ids[0]])
    speak(model, tokenizer, generated=(5, 6, 7))
    (inputs,) = model.requests
    assert inputs["input_ids"][0, -4:].tolist() == tokenizer.to_llm_ids([1, 5, 6, 7]).tolist()
    assert (inputs["min_length"].item(), inputs["request_output_len"].item()) == (1, 37)


def test_what_has_no_tensor_is_sent_as_request_parameters(tokenizer):
    model = ScriptedModel([tokenizer.end_ids[0]])
    speak(model, tokenizer)
    speak(model, tokenizer, ras_window=10)
    assert not {"seed", "random_seed"} & set(model.requests[0])
    speak(model, tokenizer, silent_tokens=(4, 7))
    assert model.parameters.pop()["silent_ids"] == " ".join(str(tokenizer.first_speech_id + token) for token in (4, 7))
    hints = {"urgent_tokens": "18", "played": "0"}
    assert model.parameters == [hints, {**hints, "ras_window": "10", "ras_tau": "0.1"}]


def test_the_c_plus_plus_backend_gets_a_bias_and_a_seed_and_no_repetition_aware_sampling(tokenizer):
    """A seed because its default is the same for all requests."""
    bias = np.zeros(9, np.float32)

    async def run(**sampling):
        model = ScriptedModel([tokenizer.end_ids[0]])
        stream = TritonLM(model, tokenizer, QUICK, bias=bias).generate(LLMPrompt("Hi"), Sampling(**sampling))
        assert [chunk.tokens async for chunk in stream] == [[], []]
        return model

    models = asyncio.run(run()), asyncio.run(run())
    (inputs,), (other,) = (model.requests for model in models)
    assert [model.parameters for model in models] == [[{}], [{}]]
    assert inputs["embedding_bias"].shape == (1, 9)
    assert inputs["seed"] == inputs["random_seed"] != other["random_seed"]
    with pytest.raises(ValueError, match="ras_window 10: TensorRT-LLM has no"):
        asyncio.run(run(ras_window=10))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("stub died"), UnavailableError),
        (UnavailableError("full"), UnavailableError),
        (ValueError("5000 tokens exceed the LLM's context"), ValueError),
    ],
)
def test_a_failing_model_is_unavailable_and_a_rejected_request_a_value_error(tokenizer, error, raised):
    with pytest.raises(raised, match=str(error)):
        speak(ScriptedModel([tokenizer.first_speech_id], error), tokenizer)


@pytest.mark.parametrize("before", [0, 1])
def test_a_silent_model_is_an_error_in_time_and_its_request_is_stopped(tokenizer, before):
    model = ScriptedModel(*[[tokenizer.first_speech_id]] * before, 30.0)
    with pytest.raises(UnavailableError, match="sent no token for 0.1 s"):
        speak(model, tokenizer)
    assert model.open_streams == 0


@pytest.mark.parametrize("moments", range(8))
async def test_a_reader_cancelled_while_tokens_arrive_ends(tokenizer, moments):
    """Python 3.11's wait_for would return what has just arrived and lose the cancellation."""
    arrives = asyncio.get_running_loop().create_future()

    async def read():
        model = ScriptedModel(arrives, [tokenizer.first_speech_id])
        stream = TritonLM(model, tokenizer).generate(LLMPrompt("Hi"), Sampling())
        try:
            await anext(stream)
            await asyncio.Event().wait()
        finally:
            await stream.aclose()

    reader = asyncio.create_task(read())
    for _ in range(9):  # until it waits
        await asyncio.sleep(0)
    arrives.set_result(None)
    for _ in range(moments):
        await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait({reader}, timeout=5)
    assert reader.cancelled()


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
