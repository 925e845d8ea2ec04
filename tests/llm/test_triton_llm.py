"""The client of the `tensorrt_llm` model, over a fake of Triton's response streams."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling, Timeouts
from cosyvoice_triton.llm.triton_client import TritonLM

QUICK = Timeouts(connect=0.1, first_token=0.1, token=0.1)


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
