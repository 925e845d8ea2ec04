"""token2wav in the real tritonserver, asked as upstream's BLS does: with a request id and no correlation id.

The requests are those of forward_token2wav in upstream's cosyvoice2_dit (runtime/triton_trtllm); `test_models` has the
other forms of ids and flags.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.voice.audio import load_audio

from tests.support.checkpoints import LLM_DIR
from tests.support.server_requests import inputs_of, wav_of

pytestmark = pytest.mark.server

HOPS = ((0, 15), (15, 40), (40, 60))  # upstream's exponential ones of 60 tokens


def chunk(tokens: np.ndarray, begin: int, end: int) -> dict[str, np.ndarray]:
    """The tensors of a chunk without a voice; the last one has no look-ahead."""
    ids = tokens[None, begin : end + LOOKAHEAD_TOKENS]
    return {"target_speech_tokens": ids, "finalize": np.array([[end == len(tokens)]])}


def test_streams_are_named_by_their_request_ids(serve: Callable[..., Any], demo_models: Path) -> None:
    """Two of them take turns, beside two sequences whose correlation ids are the same numbers."""
    first_id = read_first_speech_id(str(demo_models / LLM_DIR))
    utterances = np.random.default_rng(1).integers(first_id, first_id + 6561, (2, 60), np.int32)
    chunks = [[chunk(tokens, *hop) for hop in HOPS] for tokens in utterances]
    recordings = (samples.FOLDER / f"reference_{language}.wav" for language in ("en", "zh"))
    voices = [wav_of(load_audio(path, PROMPT_SAMPLE_RATE)) for path in recordings]
    opening = {"target_speech_tokens": utterances[:1, :0], "finalize": np.array([[False]])}
    with triton.InferenceServerClient(serve().grpc_url) as connection:

        def infer(tensors: dict[str, np.ndarray], **identity: Any) -> np.ndarray:
            return connection.infer(stacks.DIT.token2wav, inputs_of(tensors), **identity).as_numpy("waveform")[0]

        expected = []
        for number, voice, parts in zip((50, 51), voices, chunks, strict=True):
            infer(opening | voice, sequence_id=number, sequence_start=True)
            last = len(parts) - 1
            expected.append(
                [infer(part, sequence_id=number, sequence_end=index == last) for index, part in enumerate(parts)]
            )
        for number, voice in enumerate(voices, 1):
            infer(opening | voice, sequence_id=number, sequence_start=True)
        for position in range(len(HOPS)):
            for number, (voice, parts) in enumerate(zip(voices, chunks, strict=True)):
                audio = infer(parts[position] | voice, request_id=f"{number + 1}", priority=position + 1)
                np.testing.assert_allclose(audio, expected[number][position], atol=1e-5)
        for number in (1, 2):
            infer(opening, sequence_id=number, sequence_end=True)
    assert [sum(map(len, audio)) for audio in expected] == [60 * 960] * 2
    assert not np.array_equal(expected[0][1], expected[1][1])
