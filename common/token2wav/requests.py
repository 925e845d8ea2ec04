"""A request to a token2wav model, and how it is read from tensors, which are named and shaped as upstream's.

Arrays only: nothing here depends on Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.constants import MAX_SPEED, MIN_SPEED
from common.voice.prompt import Prompt

Tensors = Mapping[str, np.ndarray]

CONTROLS = ("START", "END", "CORRID")
PROMPT_TENSORS = ("prompt_speech_tokens", "prompt_speech_feat", "prompt_spk_embedding")


@dataclass(frozen=True)
class Token2WavRequest:
    """One request of a stream, which is a sequence of Triton's.

    start: opens the stream in the voice of `prompt`; `tokens` may be empty, then only the prompt cache is built.
    end: closes the stream. Unless `final`, the stream is dropped and no audio is made (an abort).
    final: the tokens are the stream's last (tensor `finalize`). None on a request that both starts and ends a stream
        and has no offset: a whole utterance, rendered at once.
    speed: speaking rate of a whole utterance; a stream is rendered at 1.
    """

    stream_id: int
    start: bool
    end: bool
    tokens: np.ndarray  # (n,) int64 ids 0..6560
    prompt: Prompt | None = None
    offset: int | None = None
    final: bool | None = None
    speed: float = 1.0

    @property
    def whole(self) -> bool:
        return self.start and self.end and self.final is None and self.offset is None

    @property
    def aborts(self) -> bool:
        return self.end and not self.final and not self.whole

    @property
    def has_chunk(self) -> bool:
        """Whether audio is to be rendered from it as a chunk of a stream."""
        return not self.whole and not self.aborts and bool(len(self.tokens) or self.final)


def read_request(tensors: Tensors, first_speech_id: int, prompt: Prompt | None = None) -> Token2WavRequest:
    """The request in `tensors`, which are given by name and with the batch dimension.

    target_speech_tokens (1, n), prompt_speech_tokens (1, P), prompt_speech_feat (1, T, 80), prompt_spk_embedding
    (1, 192), token_offset, finalize and speed (1, 1), and the sequence controls. `prompt`: the voice, if the caller
    made it from a recording. Raises ValueError naming what is missing or malformed.
    """
    speed = float(_one(tensors, "speed")) if "speed" in tensors else 1.0
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise ValueError(f"speed {speed} is not in {MIN_SPEED}..{MAX_SPEED}")
    return Token2WavRequest(
        stream_id=int(_one(tensors, "CORRID")),
        start=bool(_one(tensors, "START")),
        end=bool(_one(tensors, "END")),
        tokens=_ids(tensors, "target_speech_tokens", first_speech_id),
        prompt=prompt or _prompt(tensors, first_speech_id),
        offset=int(_one(tensors, "token_offset")) if "token_offset" in tensors else None,
        final=bool(_one(tensors, "finalize")) if "finalize" in tensors else None,
        speed=speed,
    )


def _one(tensors: Tensors, name: str) -> Any:
    array = _require(tensors, name)
    if array.size != 1:
        raise ValueError(f"{name} must hold one value, not {array.size} (shape {list(array.shape)})")
    return array.reshape(-1)[0]


def _ids(tensors: Tensors, name: str, first_speech_id: int) -> np.ndarray:
    """(1, n) in the LLM's vocabulary -> (n,) int64 in 0..6560"""
    array = _require(tensors, name)
    if array.ndim != 2 or array.shape[0] != 1:
        raise ValueError(f"{name} must have the shape [1, n], not {list(array.shape)}")
    return array[0].astype(np.int64) - first_speech_id


def _prompt(tensors: Tensors, first_speech_id: int) -> Prompt | None:
    given = [name for name in PROMPT_TENSORS if name in tensors]
    if not given:
        return None
    missing = [name for name in PROMPT_TENSORS if name not in tensors]
    if missing:
        raise ValueError(f"a voice needs {', '.join(PROMPT_TENSORS)}; {', '.join(missing)} is missing")
    mel, embedding = tensors["prompt_speech_feat"], tensors["prompt_spk_embedding"]
    return Prompt.aligned(
        _ids(tensors, "prompt_speech_tokens", first_speech_id),
        mel.reshape(-1, mel.shape[-1]).astype(np.float32),  # (1, T, 80) -> (T, 80)
        embedding.reshape(-1).astype(np.float32),  # (1, 192) -> (192,)
    )


def _require(tensors: Tensors, name: str) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    return tensors[name]
