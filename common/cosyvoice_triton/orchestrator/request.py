"""A request for speech, validated before any model is called."""

import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import MAX_SPEED, MIN_SPEED, PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.interface import Sampling, preset_values
from cosyvoice_triton.monitoring.tracing import TRACEPARENT
from cosyvoice_triton.text import clean_line, clean_text, split_instruction, strip_control_tokens
from cosyvoice_triton.text.language import EVERY, Language, named
from cosyvoice_triton.text.normalization import SPELLING, Spelled
from cosyvoice_triton.text.pronunciation import MAX_WORDS, pronunciations
from cosyvoice_triton.voice import audio
from cosyvoice_triton.voice.prompt import Recording

logger = logging.getLogger(__name__)

# Request parameters that set the sampling, and their types.
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

_FLAGS = {"cross_lingual", "text_frontend", "timeline", "segments", "played", "trim_reference"}
_PARAMETERS = {*_SAMPLING_KINDS, *SPELLING, *_FLAGS, "language", "pronunciation", "sampling", "speed", TRACEPARENT}
_TRITONS_OWN = "triton_"  # start of parameters that Triton and its clients add


@dataclass(frozen=True)
class SynthesisRequest:
    """Speak `target_text` in a voice: a recording of it, the name of a registered one, or None for the default voice.

    If the recording's transcript is known, the LLM continues the recording (zero-shot). With an `instruct_text`, which
    describes how to speak, and in `cross_lingual` mode it does not, and only the flow reproduces the voice.
    `normalize`, `as_is`, `language`, `pronunciation`: see `TextFrontend`. `speed` above 1: faster, whole texts only.
    `trim_reference`: see `Judgement.mended`.
    `timeline`: report when each stage of a streamed answer was reached. `segments`: report the segments and their
    samples. `max_tokens`: most speech tokens of the whole answer, if it has a limit. `played`: somebody hears a
    streamed answer while it is made. `pieces`: the text, in place of `target_text`, while it is being written; spoken
    as it is, without normalization and markup.
    """

    target_text: str
    voice: Recording | str | None
    instruct_text: str = ""
    cross_lingual: bool = False
    normalize: bool = True
    as_is: frozenset[Spelled] = frozenset()
    language: str = ""
    pronunciation: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_tokens: int | None = None
    speed: float = 1.0
    timeline: bool = False
    segments: bool = False
    played: bool = True
    trim_reference: bool = True
    pieces: AsyncIterator[str] | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class RequestInputs:
    """The inputs of a request as received; None for a missing one. `pieces`: where the further text comes from."""

    target_text: str | None
    reference_wav: np.ndarray | None = dataclasses.field(default=None, repr=False)
    reference_wav_len: int | None = None
    reference_sample_rate: int | None = None
    reference_text: str | None = None
    speaker: str | None = None
    instruct_text: str | None = None
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pieces: AsyncIterator[str] | None = dataclasses.field(default=None, repr=False)

    def check(
        self, defaults: Sampling, max_text_chars: int, languages: tuple[Language, ...] = EVERY
    ) -> SynthesisRequest:
        """Return the validated request. `languages`: those of the stack. Raises ValueError naming the invalid value."""
        if self.target_text is None:
            raise ValueError("target_text is missing")
        self._check_parameters()
        target_text = ""
        if self.pieces is None:
            target_text = clean_text(self.target_text, name="target_text", max_chars=max_text_chars)
        instruct_text = self._instruction(max_text_chars)
        cross_lingual = _flag("cross_lingual", self.parameters.get("cross_lingual", False))
        if instruct_text and cross_lingual:
            raise ValueError(f"cross_lingual with the instruct_text {instruct_text!r}: use one of the two")
        voice = self._voice(max_text_chars)
        if self.reference_text and (instruct_text or cross_lingual):
            other = f"instruct_text {instruct_text!r}" if instruct_text else "cross_lingual"
            raise ValueError(f"{other} with the reference_text {self.reference_text!r}: the LLM would not use the text")
        sampling = sampling_of(self.parameters, defaults)
        return SynthesisRequest(
            target_text=target_text,
            voice=voice,
            instruct_text=instruct_text,
            cross_lingual=cross_lingual,
            normalize=_flag("text_frontend", self.parameters.get("text_frontend", True)),
            as_is=frozenset(
                kind for name, kind in SPELLING.items() if not _flag(name, self.parameters.get(name, True))
            ),
            language=named(str(self.parameters.get("language", "")), languages) or "",
            # The speech service sends those of a voice and of its folder with the request's own.
            pronunciation=pronunciations(self.parameters.get("pronunciation", ""), max_words=3 * MAX_WORDS),
            sampling=sampling,
            max_tokens=sampling.max_tokens if "max_tokens" in self.parameters else None,
            speed=_speed_of(self.parameters),
            timeline=_flag("timeline", self.parameters.get("timeline", False)),
            segments=_flag("segments", self.parameters.get("segments", False)),
            played=_flag("played", self.parameters.get("played", True)),
            trim_reference=_flag("trim_reference", self.parameters.get("trim_reference", True)),
            pieces=self.pieces,
        )

    def _check_parameters(self) -> None:
        for name in self.parameters:
            if name not in _PARAMETERS and not name.startswith(_TRITONS_OWN):
                raise ValueError(f"request parameter {name!r} is unknown; known: {', '.join(sorted(_PARAMETERS))}")

    def _instruction(self, max_text_chars: int) -> str:
        """Return `instruct_text`, or the words before `<|endofprompt|>` in the text, as upstream's clients may send
        them."""
        given = self.instruct_text or ""
        if given.strip():
            plain = strip_control_tokens(given)  # the token may end it
            given = clean_line(plain, name="instruct_text", max_chars=max_text_chars) if plain.strip() else ""
            if not given:
                raise ValueError(f"instruct_text has nothing to speak: {self.instruct_text!r}")
        written = split_instruction(self.target_text or "")[0]
        if given and written:
            raise ValueError(
                f"instruct_text {given!r}, and the instruction {written!r} before <|endofprompt|> in target_text: "
                "use one of the two"
            )
        return given or written

    def _voice(self, max_text_chars: int) -> Recording | str | None:
        """Return the recording or the speaker; None without either. ValueError if both are given."""
        if self.reference_wav is not None:
            if self.speaker:
                raise ValueError(f"speaker {self.speaker!r} with a reference_wav: give only one voice")
            rate = PROMPT_SAMPLE_RATE if self.reference_sample_rate is None else self.reference_sample_rate
            wav = audio.validate_reference(self.reference_wav, self.reference_wav_len, rate)
            text = clean_line(self.reference_text or "", name="reference_text", max_chars=max_text_chars)
            return Recording(wav, text, rate)
        for name in ("reference_text", "reference_wav_len", "reference_sample_rate"):
            if (value := getattr(self, name)) not in (None, ""):
                raise ValueError(f"{name} {value!r} without a reference_wav")
        return self.speaker or None


def default_sampling(config: OrchestratorConfig) -> Sampling:
    """Return the sampling of requests that ask for none: the preset `sampling`, or `triton` if the LLM may lack
    repetition-aware sampling."""
    sampling = Sampling(**preset_values(config.sampling), max_tokens=config.max_tokens)
    # A server of unknown dialect may be any.
    able = config.llm_dialect == "vllm" if config.llm_transport == "openai" else config.llm_backend == "python"
    if able or not sampling.ras_window:
        return sampling
    logger.warning(
        "requests without sampling parameters get the sampling 'triton': ras_window %d needs the python backend of "
        "tensorrt_llm, or `vllm serve` with llm_dialect vllm",
        sampling.ras_window,
    )
    return dataclasses.replace(sampling, **preset_values("triton"))


def sampling_of(parameters: Mapping[str, Any], defaults: Sampling) -> Sampling:
    """Return `defaults`, replaced by the request's preset, and both by its single parameters.

    Raises ValueError naming the parameter and its value.
    """
    preset = preset_values(str(parameters["sampling"])) if "sampling" in parameters else {}
    given = {
        name: _number(name, parameters[name], kind) for name, kind in _SAMPLING_KINDS.items() if name in parameters
    }
    return dataclasses.replace(defaults, **preset | given)


def _speed_of(parameters: Mapping[str, Any]) -> float:
    speed = _number("speed", parameters.get("speed", 1.0), float)
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise ValueError(f"request parameter speed {speed} is not in {MIN_SPEED}..{MAX_SPEED}")
    return speed


def _flag(name: str, value: Any) -> bool:
    """Return `value` as a boolean. Text is accepted because not every client can send a boolean parameter."""
    flags: dict[str, bool] = {"true": True, "1": True, "false": False, "0": False}
    if (flag := flags.get(str(value).lower())) is None:
        raise ValueError(f"request parameter {name} must be true or false, not {value!r}")
    return flag


def _number(name: str, value: Any, kind: type[int] | type[float]) -> Any:
    """Return `value` as `kind`. Text is accepted because not every client can send a float parameter."""
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
