"""One request to speak, checked before any model is asked."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import audio
from common.constants import MAX_SPEED, MIN_SPEED
from common.llm.base import Sampling
from common.text import normalise_text

# Request parameters that set the sampling, and their kinds. Others are not ours to judge: Triton adds its own.
_SAMPLING_KINDS: dict[str, type[int] | type[float]] = {
    "seed": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "repetition_penalty": float,
    "max_tokens": int,
    "ras_window": int,
    "ras_tau": float,
}


@dataclass(frozen=True)
class SpeechRequest:
    """Say `target_text` in the voice of `reference`, (T,) float32 at 16 kHz, padding removed.

    `reference_text` is what the reference says. Empty is cross-lingual mode: the LLM continues no recording, and the
    flow alone keeps the voice. `speed` above 1 speaks faster; only whole utterances can be stretched.
    """

    target_text: str
    reference: np.ndarray = dataclasses.field(repr=False)
    reference_text: str = ""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RequestInputs:
    """The inputs of a request as they arrive; None where one is missing."""

    target_text: str | None
    reference_wav: np.ndarray | None = dataclasses.field(default=None, repr=False)
    reference_wav_len: int | None = None
    reference_text: str | None = None
    speaker: str | None = None
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self, defaults: Sampling, max_text_chars: int) -> SpeechRequest:
        """The request they make. Raises ValueError naming the value that is wrong."""
        if self.target_text is None:
            raise ValueError("target_text is missing")
        target_text = normalise_text(self.target_text, name="target_text", max_chars=max_text_chars)
        sampling = sampling_of(self.parameters, defaults)
        speed = _speed_of(self.parameters)
        reference = self._reference()
        # No words are no transcript; control tokens alone are a mistake.
        reference_text = (self.reference_text or "").strip()
        if reference_text:
            reference_text = normalise_text(reference_text, name="reference_text", max_chars=max_text_chars)
        return SpeechRequest(target_text, reference, reference_text, sampling, speed)

    def _reference(self) -> np.ndarray:
        if self.speaker:
            raise ValueError(f"unknown speaker {self.speaker!r}; known speakers: none")
        if self.reference_wav is not None:
            return audio.validate_reference(self.reference_wav, self.reference_wav_len)
        if self.reference_text:
            raise ValueError(f"reference_text {self.reference_text!r} without a reference_wav")
        if self.reference_wav_len is not None:
            raise ValueError(f"reference_wav_len {self.reference_wav_len} without a reference_wav")
        raise ValueError("no voice to speak in: the request has neither a reference_wav nor a speaker")


def sampling_of(parameters: Mapping[str, Any], defaults: Sampling) -> Sampling:
    """`defaults` with the request's parameters in place. Raises ValueError naming the parameter and its value."""
    given = {
        name: _number(name, parameters[name], kind) for name, kind in _SAMPLING_KINDS.items() if name in parameters
    }
    return dataclasses.replace(defaults, **given)


def _speed_of(parameters: Mapping[str, Any]) -> float:
    speed = _number("speed", parameters.get("speed", 1.0), float)
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise ValueError(f"request parameter speed {speed} is not in {MIN_SPEED}..{MAX_SPEED}")
    return speed


def _number(name: str, value: Any, kind: type[int] | type[float]) -> Any:
    """`value` as `kind`. Numbers may come as text, since not every client can send a float parameter."""
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError
        number = kind(value)
        if not math.isfinite(number) or (isinstance(value, float) and number != value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        article = "an integer" if kind is int else "a number"
        raise ValueError(f"request parameter {name} must be {article}, not {value!r}") from None
    return number
