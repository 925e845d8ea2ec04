"""The models token2wav and token2wav_dit with the demo checkpoint (random weights) and the fake of Triton's API; in the
real tritonserver, asked as upstream's BLS does, with a request id and no correlation id: the requests are those of
forward_token2wav in upstream's cosyvoice2_dit (runtime/triton_trtllm)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from cosyvoice_triton import constants, samples, stacks
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.token2wav.serving.requests import read_request
from cosyvoice_triton.voice.audio import load_audio
from tritonclient.utils import np_to_triton_dtype

from tests.conftest import ROOT, initialized_model
from tests.support import fake_triton
from tests.support.checkpoints import DIT_DIR, LLM_DIR, UNET_DIR
from tests.support.waiting import until

PATHS = {
    "token2wav": ("model_repo/token2wav/1/model.py", UNET_DIR),
    "token2wav_dit": ("model_repo_dit/token2wav_dit/1/model.py", DIT_DIR),
}
TOKENS_PER_SECOND_OF_AUDIO = constants.TOKEN_MEL_RATIO * constants.HOP_SAMPLES


class Served:
    """A model with a client: `send` answers with the waveform or raises the error's message."""

    def __init__(self, name: str, models: Any):
        path, directory = PATHS[name]
        template = (ROOT / path).parents[1] / "config.pbtxt"
        self.inputs = frozenset(re.findall(r'name: "(\w+)" data_type', template.read_text()))
        self.first_speech_id = read_first_speech_id(str(models / LLM_DIR))
        parameters = {"model_dir": str(models / directory), "llm_tokenizer_dir": str(models / LLM_DIR)}
        parameters |= {"n_timesteps": "2", "max_streams": "3", "profile": "unlimited"}
        self.model = initialized_model(ROOT / path, **parameters)

    def send(self, stream: int, *, start: bool = False, end: bool = False, **tensors: np.ndarray) -> np.ndarray:
        flags = start * fake_triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        flags |= end * fake_triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        request = fake_triton.InferenceRequest.from_client(
            tensors, declared=self.inputs, correlation_id=stream, flags=flags
        )
        assert self.model.execute([request]) is None
        sender = request.get_response_sender()
        until(lambda: sender.final)
        (response,) = sender.responses
        if response.has_error():
            raise RuntimeError(response.error().message())
        waveform = response.arrays()["waveform"]
        assert waveform.shape[0] == 1 and waveform.dtype == np.float32
        return waveform[0]

    def ids(self, *tokens: int) -> np.ndarray:
        return np.array([tokens], np.int32).reshape(1, -1) + np.int32(self.first_speech_id)

    def voice(self, seed: int, tokens: int = 25) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            "prompt_speech_tokens": self.ids(*rng.integers(0, 6561, tokens)),
            "prompt_speech_feat": (rng.standard_normal((1, 2 * tokens + 1, constants.MEL_BINS)) - 6).astype(np.float16),
            "prompt_spk_embedding": rng.standard_normal((1, constants.SPEAKER_DIM)).astype(np.float16),
        }


@pytest.fixture(scope="module", params=list(PATHS))
def served(request: pytest.FixtureRequest, demo_models: Any) -> Any:
    served = Served(request.param, demo_models)
    yield served
    served.model.finalize()


def finalize(value: bool) -> dict[str, np.ndarray]:
    return {"finalize": np.array([[value]])}


@pytest.mark.parametrize("prompt", [25, 0])
def test_a_sequence_of_chunks_returns_all_of_its_audio(served: Served, prompt: int) -> None:
    tokens = list(range(60))
    assert len(served.send(1, start=True, target_speech_tokens=served.ids(), **served.voice(1, prompt))) == 0
    begin = 0 if "token_offset" in served.inputs else 25
    head = served.send(
        1, target_speech_tokens=served.ids(*tokens[: 25 + constants.LOOKAHEAD_TOKENS]), **finalize(False)
    )
    tail = served.send(1, end=True, target_speech_tokens=served.ids(*tokens[begin:]), **finalize(True))
    assert 0 < len(head) < 25 * TOKENS_PER_SECOND_OF_AUDIO
    assert len(head) + len(tail) == 60 * TOKENS_PER_SECOND_OF_AUDIO


def test_one_request_without_finalize_returns_a_whole_utterance_at_the_given_speed(served: Served) -> None:
    tokens = {"target_speech_tokens": served.ids(*range(20))}
    audio = served.send(2, start=True, end=True, **tokens, **served.voice(2))
    assert len(audio) == 20 * TOKENS_PER_SECOND_OF_AUDIO
    fast = served.send(2, start=True, end=True, speed=np.array([[2.0]], np.float32), **tokens, **served.voice(2))
    assert len(fast) == len(audio) // 2


def test_an_error_names_its_value_and_the_next_request_is_served(served: Served) -> None:
    with pytest.raises(RuntimeError, match="speech token 6561 is outside 0..6560"):
        served.send(3, start=True, end=True, target_speech_tokens=served.ids(6561), **served.voice(3))
    with pytest.raises(RuntimeError, match="target_speech_tokens is missing"):
        served.send(3, start=True)
    with pytest.raises(RuntimeError, match="sequence 3 is not live"):
        served.send(3, target_speech_tokens=served.ids(1, 2), **finalize(True))
    with pytest.raises(RuntimeError, match="prompt_spk_embedding is missing"):
        voice = served.voice(3)
        del voice["prompt_spk_embedding"]
        served.send(3, start=True, target_speech_tokens=served.ids(), **voice)
    assert len(served.send(3, start=True, end=True, target_speech_tokens=served.ids(1, 2), **served.voice(3)))


@pytest.mark.parametrize("served", ["token2wav_dit"], indirect=True)
def test_the_dit_model_accepts_a_recording_as_the_voice(served: Served) -> None:
    wav = load_audio(samples.FOLDER / "reference_en.wav", constants.PROMPT_SAMPLE_RATE)
    padded = np.pad(wav, (0, 3 * constants.PROMPT_SAMPLE_RATE))[None]
    tokens = served.ids(*range(20))
    length = np.array([[len(wav)]], np.int32)
    one = served.send(5, start=True, end=True, target_speech_tokens=tokens, reference_wav=wav[None])
    two = served.send(
        5, start=True, end=True, target_speech_tokens=tokens, reference_wav=padded, reference_wav_len=length
    )
    assert len(one) == 20 * TOKENS_PER_SECOND_OF_AUDIO
    np.testing.assert_array_equal(one, two)
    with pytest.raises(RuntimeError, match="reference_wav is silent"):
        served.send(5, start=True, target_speech_tokens=tokens, reference_wav=np.zeros_like(padded))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_speech_tokens": np.zeros((2, 4), np.int32)}, r"target_speech_tokens must have the shape \[1, n\]"),
        ({"finalize": np.zeros((1, 2), bool)}, r"finalize must hold one value, not 2"),
        ({"speed": np.array([[9.0]], np.float32)}, r"speed 9.0 is not in"),
        ({"audio_left": np.array([[-0.5]], np.float32)}, r"audio_left -0.5 is not in 0..3600, the seconds of audio"),
        ({"audio_left": np.array([[np.inf]], np.float32)}, r"audio_left inf is not in"),
    ],
)
def test_a_malformed_tensor_is_named(change: dict[str, np.ndarray], message: str) -> None:
    tensors = {"target_speech_tokens": np.zeros((1, 4), np.int32)}
    with pytest.raises(ValueError, match=message):
        read_request(tensors | change, 0, correlation_id=1, start=True, end=True, request_id="")


def origin(
    correlation_id: int | str, request_id: str = "", *, start: bool = False, end: bool = False
) -> dict[str, Any]:
    return {"correlation_id": correlation_id, "request_id": request_id, "start": start, "end": end}


OFFSET, FINAL, NOT_FINAL = {"token_offset": np.array([[40]], np.int32)}, finalize(True), finalize(False)
FIRST = {"token_offset": np.array([[0]], np.int32)}


@pytest.mark.parametrize(
    ("identity", "tensors", "stream_id", "start", "end"),
    [
        (origin(7, start=True), FIRST | NOT_FINAL, "sequence 7", True, False),
        (origin(7), OFFSET | NOT_FINAL, "sequence 7", False, False),
        (origin(7, end=True), OFFSET | FINAL, "sequence 7", False, True),
        (origin("7"), NOT_FINAL, "sequence 7", False, False),
        (origin(0, "7"), FIRST | NOT_FINAL, "request 7", True, False),
        (origin(0, "7"), OFFSET | NOT_FINAL, "request 7", False, False),
        (origin(0, "7"), OFFSET | FINAL, "request 7", False, True),
        (origin(0, "7"), NOT_FINAL, "request 7", None, False),
        (origin("", "7"), FINAL, "request 7", None, True),
        (origin(0, "7"), {}, "utterance 7", True, True),  # not a live stream of that name, whatever happens to it
        (origin(0, ""), {}, "utterance ", True, True),
    ],
)
def test_the_ids_and_flags_of_a_request_name_its_stream(identity, tensors, stream_id, start, end) -> None:
    request = read_request(tensors | {"target_speech_tokens": np.zeros((1, 4), np.int32)}, 0, **identity)
    assert (request.stream_id, request.start, request.end) == (stream_id, start, end)


@pytest.mark.server
def test_a_stream_is_named_by_its_request_id(serve: Callable[..., Any], demo_models: Path) -> None:
    """Its audio is that of a sequence. Each request has the voice; the last chunk has no look-ahead."""
    first_id = read_first_speech_id(str(demo_models / LLM_DIR))
    tokens = np.random.default_rng(1).integers(first_id, first_id + 6561, (1, 60), np.int32)
    voice = {"reference_wav": load_audio(samples.FOLDER / "reference_en.wav", PROMPT_SAMPLE_RATE)[None]}
    chunks = [
        {"target_speech_tokens": tokens[:, begin : end + LOOKAHEAD_TOKENS], **finalize(end == 60)}
        for begin, end in ((0, 15), (15, 40), (40, 60))  # upstream's exponential hops
    ]
    with triton.InferenceServerClient(serve().grpc_url) as connection:

        def infer(tensors: dict[str, np.ndarray], **identity: Any) -> np.ndarray:
            inputs = [
                triton.InferInput(name, list(each.shape), np_to_triton_dtype(each.dtype)).set_data_from_numpy(each)
                for name, each in tensors.items()
            ]
            return connection.infer(stacks.DIT.token2wav, inputs, **identity).as_numpy("waveform")[0]

        infer({"target_speech_tokens": tokens[:, :0], **finalize(False)} | voice, sequence_id=50, sequence_start=True)
        expected = [infer(part, sequence_id=50, sequence_end=part is chunks[-1]) for part in chunks]
        for position, (part, audio) in enumerate(zip(chunks, expected, strict=True), 1):
            found = infer(part | voice, request_id="1", priority=position)
            np.testing.assert_allclose(found, audio, atol=1e-5)
    assert sum(map(len, expected)) == 60 * 960
