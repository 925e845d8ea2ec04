"""Every tensor of every model's config with the largest value that is taken and the first that is refused, and what
reading it costs: the same bounds as for the fields over HTTP, see tests/speech_service/test_limits.py."""

import re
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
from cosyvoice_triton import constants
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.llm import triton_client as llm
from cosyvoice_triton.llm.interface import MAX_SEED
from cosyvoice_triton.orchestrator.model import _inputs
from cosyvoice_triton.orchestrator.request import RequestRules
from cosyvoice_triton.server.rendering import TEMPLATES
from cosyvoice_triton.token2wav.serving.requests import MAX_AUDIO_LEFT, read_request
from cosyvoice_triton.triton_io import read_all
from cosyvoice_triton.voice.model import reference

from tests.speech_service.test_limits import BYTES, BYTES_PER_BYTE, SECONDS, SECONDS_PER_BYTE, slowness
from tests.support.fake_triton import InferenceRequest

Tensors = Mapping[str, np.ndarray | None]
CHARS, VOCAB, CONTEXT = OrchestratorConfig.max_text_chars, 6_700, 4_096
HUGE = 4 << 20  # elements, of the largest message that gRPC takes by default


class Limit(NamedTuple):
    """`largest` is taken, the others are refused; `beside`: what else a request needs for that, None: what is not
    sent."""

    largest: np.ndarray
    refused: tuple[np.ndarray, ...] = ()
    beside: Mapping[str, np.ndarray | None] = {}


def number(value: Any, kind: Any = np.int32) -> np.ndarray:
    return np.array([[value]], kind)


def text(value: str) -> np.ndarray:
    return np.array([[value.encode()]], object)


def wave(samples: int) -> np.ndarray:
    return np.sin(np.arange(samples, dtype=np.float32))[None]


def up_to(most: Any, beyond: Any, kind: Any = np.int32, **beside: np.ndarray | None) -> Limit:
    """Of a single value."""
    two = np.full((1, HUGE), most, kind)
    return Limit(number(most, kind), (number(beyond, kind), two), beside)


def texts(**beside: np.ndarray | None) -> Limit:
    refused = text("a" * (CHARS + 1)), text("\u0301" * (CHARS + 1)), text("\u0301" * HUGE), number(b"\xff", object)
    return Limit(text("a" * CHARS), refused, beside)


def waves(seconds: int) -> Limit:
    size = 16_000 * seconds
    return Limit(wave(size), (wave(size + 1), wave(HUGE), np.full((1, HUGE), np.nan, np.float32)))


def ids(count: int, **beside: np.ndarray | None) -> Limit:
    some = np.zeros((1, count), np.int32)
    return Limit(some, (np.zeros((1, count + 1), np.int32), np.zeros((1, HUGE), np.int32)), beside)


def mel(tokens: int) -> np.ndarray:
    return np.zeros((1, 2 * tokens, constants.MEL_BINS), np.float16)


RECORDING = {
    "reference_wav": waves(30),
    "reference_wav_len": up_to(32_000, 32_001),
    "reference_sample_rate": up_to(
        constants.MAX_REFERENCE_RATE, constants.MAX_REFERENCE_RATE + constants.REFERENCE_RATE_STEP
    ),
}
WITHOUT = {"reference_wav": None}
SOURCE = {**WITHOUT, "target_text": None}
SPEECH = {
    **RECORDING,
    **dict.fromkeys(("target_text", "reference_text", "instruct_text"), texts()),
    "speaker": texts(**WITHOUT),
    "source_wav": waves(120)._replace(beside=SOURCE),
    "source_sample_rate": RECORDING["reference_sample_rate"]._replace(beside={**SOURCE, "source_wav": wave(32_000)}),
}
LONGER = np.zeros((1, constants.MAX_PROMPT_TOKENS + 1), np.int32)
RENDERING = {
    **{
        name: limit._replace(beside={"reference_wav": wave(32_000)} | dict(limit.beside))
        for name, limit in RECORDING.items()
    },
    "target_speech_tokens": ids(constants.MAX_STREAM_TOKENS),
    "prompt_speech_tokens": ids(constants.MAX_PROMPT_TOKENS, prompt_speech_feat=mel(constants.MAX_PROMPT_TOKENS + 1)),
    "prompt_speech_feat": Limit(
        mel(constants.MAX_PROMPT_TOKENS),
        (mel(constants.MAX_PROMPT_TOKENS + 1), mel(HUGE // 160), np.full_like(mel(4), np.inf)),
        {"prompt_speech_tokens": LONGER},
    ),
    "prompt_spk_embedding": Limit(
        np.zeros((1, constants.SPEAKER_DIM), np.float16),
        (np.zeros((1, constants.SPEAKER_DIM + 1), np.float16), np.full((1, constants.SPEAKER_DIM), np.nan, np.float16)),
    ),
    "token_offset": Limit(number(2**31 - 1), (np.zeros((1, HUGE), np.int32),)),  # the stream knows its own
    "finalize": Limit(number(True, bool), (np.ones((1, HUGE), bool),)),
    "speed": up_to(constants.MAX_SPEED, np.nextafter(np.float32(constants.MAX_SPEED), np.float32(9)), np.float32),
    "audio_left": up_to(MAX_AUDIO_LEFT, np.nextafter(np.float32(MAX_AUDIO_LEFT), np.float32(9e9)), np.float32),
}
TOP = np.float32(10), np.nextafter(np.float32(10), np.float32(11)), np.float32
GENERATION = {
    "input_ids": ids(CONTEXT - 200),
    "input_lengths": up_to(4, 5),
    "request_output_len": up_to(constants.MAX_STREAM_TOKENS, constants.MAX_STREAM_TOKENS + 1),
    "end_id": up_to(VOCAB - 1, VOCAB),
    "temperature": up_to(*TOP),
    "repetition_penalty": up_to(*TOP),
    "runtime_top_k": Limit(number(2**31 - 1), (number(-1), np.zeros((1, HUGE), np.int32))),
    "runtime_top_p": up_to(1, np.nextafter(np.float32(1), np.float32(2)), np.float32),
    **dict.fromkeys(("random_seed", "seed"), up_to(MAX_SEED, MAX_SEED + 1, np.uint64)),
    **dict.fromkeys(("min_length", "min_tokens"), up_to(200, 201)),
    **dict.fromkeys(("stop", "streaming"), Limit(number(True, bool), (np.ones((1, HUGE), bool),))),
    **{name: up_to(neutral, not neutral, np.float32) for name, neutral in llm.NEUTRAL_INPUTS.items()},
}
UNREAD = {"encoder_output_lengths", "pad_id", "len_penalty"}  # by the python backend


def request(sent: Mapping[str, np.ndarray | None], **defaults: np.ndarray) -> InferenceRequest:
    return InferenceRequest.from_client({name: each for name, each in {**defaults, **sent}.items() if each is not None})


def speech(sent: Tensors) -> object:
    return RequestRules().request(**_inputs(request(sent, target_text=text("Hello."), reference_wav=wave(32_000))))


def rendering(sent: Tensors) -> object:
    if "reference_wav" in sent:
        return reference(request(sent))
    some = np.zeros((1, 4), np.int32)
    voice = {"prompt_speech_tokens": some, "prompt_speech_feat": mel(4)}
    voice |= {"prompt_spk_embedding": np.zeros((1, constants.SPEAKER_DIM), np.float16)}
    given = read_all(request(sent, target_speech_tokens=some, **voice))
    return read_request(given, 0, correlation_id=1, start=True, end=True, request_id="")


def encoding(sent: Tensors) -> object:
    return reference(request(sent, reference_wav=wave(32_000)))


def generation(sent: Tensors) -> object:
    some = {"input_ids": np.zeros((1, 4), np.int32), "request_output_len": number(200)}
    given = read_all(request(sent, **some), llm.ALL_INPUTS)
    flags = [llm.scalar(given, name, False) for name in ("stop", "streaming")]
    generated = llm.generation_request(given, {}, (VOCAB - 1,))
    generated.check(VOCAB, CONTEXT)
    return generated, flags


Read = Callable[[Tensors], object]
READERS: list[tuple[str, Read, Mapping[str, Limit]]] = [
    ("token2wav", rendering, RENDERING),
    ("cosyvoice", speech, SPEECH),
    ("tensorrt_llm", generation, GENERATION),
    ("", encoding, RECORDING),
]


def every_tensor() -> Iterator[Any]:
    for config in sorted(TEMPLATES.glob("model_repo*/*/config.pbtxt")):
        model = config.parent.name
        inputs = config.read_text().partition("\ninput [")[2].partition("\n]")[0]
        read, limits = next((read, limits) for start, read, limits in READERS if model.startswith(start))
        for name in re.findall(r'\{ name: "(\w+)"', inputs):
            if name not in UNREAD:
                yield pytest.param(name, read, limits, id=f"{model}-{name}")


def spent(read: Read, sent: Tensors) -> tuple[bool, float, int]:
    """Whether it is taken, and the CPU seconds and bytes of memory that reading it needs; the least of three times."""
    taken, seconds = False, []
    for _ in range(3):
        begun = time.process_time()
        try:
            taken = read(sent) is not None
        except ValueError as error:
            assert len(str(error)) < 4 * CHARS
        seconds.append(time.process_time() - begun)
    tracemalloc.start()
    with suppress(ValueError):
        read(sent)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken, min(seconds), most


@pytest.mark.serial
@pytest.mark.parametrize(("name", "read", "limits"), [*every_tensor()])
def test_the_largest_tensor_is_taken_and_the_first_beyond_is_refused_at_little_cost(name, read, limits) -> None:
    unsupported = Limit(np.zeros(0), (np.zeros((1, 1), np.float32), np.zeros((1, HUGE), np.float32)))
    limit = unsupported if name in llm.UNSUPPORTED_INPUTS else limits[name]
    slow = slowness()
    for value in (limit.largest, *limit.refused):
        sent = {**limit.beside, name: value}
        arrays = [each for each in sent.values() if each is not None]
        size = sum(len(each.item()) if each.dtype == object else each.nbytes for each in arrays)
        taken, seconds, most = spent(read, sent)
        about = name, value.shape, taken, seconds, most
        assert taken == (value is limit.largest and limit is not unsupported) or value.size == 0, about
        assert seconds < (SECONDS + SECONDS_PER_BYTE * size) * slow and most < BYTES + BYTES_PER_BYTE * size, about
