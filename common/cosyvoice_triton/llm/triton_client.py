"""The LLM as a model of the same Triton: its tensors, which are those of TensorRT-LLM's backend, and a client of it.

Whichever backend serves the model, each tensor has a leading batch dimension of 1. Sampling values that have no tensor
are parameters of the request; only the python backend reads those.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from async_timeout import timeout

from cosyvoice_triton.batches import scalar
from cosyvoice_triton.constants import MAX_STREAM_TOKENS
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import URGENT_TOKENS, LengthRatios, LLMPrompt, Sampling, Timeouts, TokenChunk
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring import tracing

Tensors = Mapping[str, np.ndarray]
NumberT = TypeVar("NumberT", int, float)

INPUTS = ("input_ids", "input_lengths", "request_output_len", "end_id", "streaming", "stop")
# Inputs that set the sampling, and their names in `Sampling`. TensorRT-LLM renamed two of them: both names are sent,
# because an old backend reads only the first and a new one only the second.
SAMPLING_INPUTS = {
    "temperature": "temperature",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "random_seed": "seed",
    "seed": "seed",
    "min_length": "min_tokens",
    "min_tokens": "min_tokens",
}
# Inputs that the C++ backend supports and the python backend does not: rejected, unless the value has no effect.
UNSUPPORTED_INPUTS = ("stop_words_list", "bad_words_list", "embedding_bias", "encoder_input_features")
NEUTRAL_INPUTS = {
    "beam_width": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_log_probs": False,
    "return_context_logits": False,
    "return_generation_logits": False,
}
MAX_SILENT_IDS = 256
RESPONSE_OUTPUTS = ("output_ids", "sequence_length")
ALL_INPUTS = (*INPUTS, *SAMPLING_INPUTS, *UNSUPPORTED_INPUTS, *NEUTRAL_INPUTS)


def request_tensors(input_ids: np.ndarray, sampling: Sampling, end_id: int) -> dict[str, np.ndarray]:
    """Return a streaming request for the prompt (n,). Every tensor has a leading dimension of 1."""
    tensors = {
        "input_ids": input_ids.astype(np.int32)[None],
        "input_lengths": np.array([[len(input_ids)]], np.int32),
        "request_output_len": np.array([[sampling.max_tokens]], np.int32),
        "end_id": np.array([[end_id]], np.int32),
        "pad_id": np.array([[end_id]], np.int32),
        "min_length": np.array([[sampling.min_tokens]], np.int32),
        "min_tokens": np.array([[sampling.min_tokens]], np.int32),
        "streaming": np.array([[True]]),
        "temperature": np.array([[sampling.temperature]], np.float32),
        "runtime_top_k": np.array([[sampling.top_k]], np.int32),
        "runtime_top_p": np.array([[sampling.top_p]], np.float32),
        "repetition_penalty": np.array([[sampling.repetition_penalty]], np.float32),
    }
    if sampling.seed is not None:
        tensors["random_seed"] = tensors["seed"] = np.array([[sampling.seed]], np.uint64)
    return tensors


def request_parameters(prompt: LLMPrompt, sampling: Sampling, first_speech_id: int) -> dict[str, str]:
    """Return what has no tensor, as text because request parameters cannot be floats."""
    parameters = {"urgent_tokens": str(prompt.urgent_tokens), "played": str(int(prompt.played))}
    if prompt.urgent_tokens and prompt.silent_tokens:
        parameters["silent_ids"] = " ".join(str(first_speech_id + token) for token in prompt.silent_tokens)
    if sampling.ras_window:
        parameters |= {"ras_window": str(sampling.ras_window), "ras_tau": str(sampling.ras_tau)}
    return parameters


def generation_request(
    tensors: Tensors, parameters: Mapping[str, object], end_ids: tuple[int, ...]
) -> GenerationRequest:
    """Return the request in tensors and parameters. ValueError names what is missing, invalid or not supported."""
    _reject_unsupported(tensors)
    if "input_ids" not in tensors:
        raise ValueError("input_ids is missing")
    input_ids = tensors["input_ids"].reshape(-1)
    length = scalar(tensors, "input_lengths", len(input_ids))
    if not 0 < length <= len(input_ids):
        raise ValueError(f"input_lengths {length} is outside 1..{len(input_ids)}, the size of input_ids")
    if "request_output_len" not in tensors:
        raise ValueError("request_output_len is missing")
    given = {ours: scalar(tensors, name) for name, ours in SAMPLING_INPUTS.items() if name in tensors}
    end_id = scalar(tensors, "end_id", end_ids[0])
    urgent_tokens = _parameter(parameters, "urgent_tokens", int, URGENT_TOKENS)
    if not 0 <= urgent_tokens <= MAX_STREAM_TOKENS:  # a listener would take the turns of all others
        raise ValueError(f"request parameter urgent_tokens {urgent_tokens} is out of range: 0..{MAX_STREAM_TOKENS}")
    sampling = Sampling(
        max_tokens=scalar(tensors, "request_output_len"),
        ras_window=_parameter(parameters, "ras_window", int, 0),
        ras_tau=_parameter(parameters, "ras_tau", float, Sampling.ras_tau),
        **given,
    )
    return GenerationRequest(
        input_ids[:length].astype(np.int64),
        sampling,
        tuple(dict.fromkeys((*end_ids, end_id))),
        urgent_tokens,
        bool(_parameter(parameters, "played", int, 0)),
        _silent_ids(parameters),
    )


def output_tensors(tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """Return ids (n,) as `output_ids` (1, beam 1, n), and their number (1, 1)."""
    return {
        "output_ids": np.array([[tokens]], np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(tokens)]], np.int32),
    }


def _parameter(parameters: Mapping[str, object], name: str, kind: type[NumberT], default: NumberT) -> NumberT:
    value = parameters.get(name, default)
    try:
        return kind(str(value))
    except ValueError:
        raise ValueError(f"request parameter {name} must be a number, not {str(value)[:80]!r}") from None


def _silent_ids(parameters: Mapping[str, object]) -> frozenset[int]:
    given = str(parameters.get("silent_ids", "")).split()
    if len(given) > MAX_SILENT_IDS or not all(each.isascii() and each.isdecimal() and len(each) < 8 for each in given):
        raise ValueError(
            f"request parameter silent_ids must be up to {MAX_SILENT_IDS} ids, not {' '.join(given)[:80]!r}"
        )
    return frozenset(map(int, given))


def _reject_unsupported(tensors: Tensors) -> None:
    for name in UNSUPPORTED_INPUTS:
        if name in tensors:
            raise ValueError(f"{name} is not supported by the python backend of tensorrt_llm")
    for name, neutral in NEUTRAL_INPUTS.items():
        if (value := scalar(tensors, name, neutral)) != neutral:
            raise ValueError(f"{name} {value} is not supported by the python backend of tensorrt_llm, only {neutral}")


if TYPE_CHECKING:
    from cosyvoice_triton.triton_io.streams import Streams

CLOSE_SECONDS = 1.0  # from the end token to the end of the stream

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TritonLM:
    """Speech tokens from the `tensorrt_llm` model.

    bias (vocabulary,): only for the C++ backend, which adds it to the logits; minus infinity for all but speech and
    end tokens.
    """

    streams: "Streams"
    tokenizer: LLMTokenizer
    timeouts: Timeouts = Timeouts()
    ratios: LengthRatios = LengthRatios()
    bias: np.ndarray | None = None

    async def aclose(self) -> None:
        """Close the connection."""
        await self.streams.aclose()

    async def generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        """Yield the speech tokens of `prompt`, see `SpeechLM`."""
        sampling = self.ratios.bound(sampling, prompt, self.tokenizer.text_length(prompt.target_text))
        if self.bias is not None:
            sampling = sampling.seeded()
        input_ids = self.tokenizer.encode_prompt(prompt)
        inputs = request_tensors(input_ids, sampling, self.tokenizer.end_ids[0])
        parameters = request_parameters(prompt, sampling, self.tokenizer.first_speech_id) | tracing.carried()
        if self.bias is not None:  # the C++ backend, which reads no parameters
            inputs["embedding_bias"] = self.bias[None]
            if sampling.ras_window:
                raise ValueError(f"ras_window {sampling.ras_window}: TensorRT-LLM has no repetition-aware sampling")
            parameters = {}
        wait, ends = self.timeouts.first_token, frozenset(self.tokenizer.end_ids)
        generated, ended = 0, False
        try:
            async with aclosing(self.streams.ask(inputs, parameters)) as responses:
                while not ended:
                    async with timeout(wait):
                        outputs = await anext(responses, None)
                    if outputs is None:
                        break
                    length = outputs["sequence_length"].item()
                    llm_ids = outputs["output_ids"].reshape(-1)[:length].tolist()  # padded after it
                    generated += len(llm_ids)
                    ended = not ends.isdisjoint(llm_ids)
                    wait = self.timeouts.token
                    yield TokenChunk(self.tokenizer.to_speech_ids(llm_ids))
                if ended:
                    await _read_end(responses)
            # TensorRT-LLM's tensors give no finish reason; the token count does.
            yield TokenChunk([], "length" if generated >= sampling.max_tokens and not ended else "stop")
        except asyncio.TimeoutError:
            raise UnavailableError(f"the LLM sent no token for {wait} s") from None
        except UnavailableError:
            raise
        except RuntimeError as error:
            raise UnavailableError(f"the LLM failed: {error}") from error


async def _read_end(responses: AsyncIterator[object]) -> None:
    """Read up to the last response, or a finished request would count as cancelled. The answer does not wait for it."""
    try:
        async with timeout(CLOSE_SECONDS):
            await anext(responses, None)
    except asyncio.TimeoutError:
        logger.warning("the LLM did not end its stream within %g s of its last token", CLOSE_SECONDS)
