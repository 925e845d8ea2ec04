"""A request for speech, validated before any model is called."""

import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any

import numpy as np

from cosyvoice_triton import constants
from cosyvoice_triton.config import BOOLEANS, OrchestratorConfig
from cosyvoice_triton.llm.interface import Sampling, preset_values
from cosyvoice_triton.monitoring.tracing import TRACEPARENT
from cosyvoice_triton.orchestrator.conversion import Source
from cosyvoice_triton.orchestrator.report import OnWarning, ignore
from cosyvoice_triton.text.cleaning import (
    clean_line,
    clean_text,
    clean_transcript,
    split_instruction,
    strip_control_tokens,
)
from cosyvoice_triton.text.frontend import SPELLING
from cosyvoice_triton.text.language import EVERY, Language, named
from cosyvoice_triton.text.markup import left_out, without_duration
from cosyvoice_triton.text.pronunciation import MAX_FILE_BYTES, MAX_WORDS, pronunciations
from cosyvoice_triton.voice.prompt import Recording, validate_reference

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

# Flags of requests for speech and for a conversion, of those for speech alone, and of how a text is read, with their
# defaults; what else a request may have.
_FLAGS = {"timeline": False, "segments": False, "played": True, "trim_reference": False}
_FLAGS_OF_SPEECH = {"cross_lingual": False, "carry_tone": False}
_FLAGS_OF_READING = dict.fromkeys(("text_frontend", *SPELLING), True)
_OTHERS = ("trim_silence", "retry_bad_answers", "language", "pronunciation", "duration", "sampling", "speed")
_PARAMETERS = {*_SAMPLING_KINDS, *_FLAGS, *_FLAGS_OF_SPEECH, *_FLAGS_OF_READING, *_OTHERS, TRACEPARENT}
_TRITONS_OWN = "triton_"  # start of parameters that Triton and its clients add


@dataclass(frozen=True)
class SynthesisRequest:
    """Speak `target_text` in a voice: a recording of it, the name of a registered one, or None for the default voice.

    If the recording's transcript is known, the LLM continues the recording (zero-shot); in `cross_lingual` mode it does
    not, and only the flow reproduces the voice. `instruct_text` describes how to speak, in place of the voice's own
    instruction; a registered voice is then not continued either.
    `normalize`, `as_is`, `language`, `pronunciation`: see `TextFrontend`. `speed` above 1: faster.
    `duration`: seconds of the whole answer, which is then sent at once, see `length`. `carry_tone`: see
    `last_sentence`. `trim_reference`: see `Judgement.mended`. `trim_silence`: whether the silence that the LLM makes at
    the ends of segments is cut; false gives upstream's samples. `retry_bad_answers`: see `judges.Judge`; not of a
    request that is repeatable, unless it asks for it.
    `timeline`: report when each stage of a streamed answer was reached. `segments`: report the segments and their
    samples. `max_tokens`: most speech tokens of the whole answer, if it has a limit. `played`: somebody hears a
    streamed answer while it is made. `pieces`: the text, in place of `target_text`, while it is being written; spoken
    as it is, without normalization and markup. `source`: speech to convert to the voice, in place of a text.
    """

    target_text: str
    voice: Recording | str | None
    instruct_text: str = ""
    cross_lingual: bool = False
    normalize: bool = True
    as_is: frozenset[str] = frozenset()
    language: str = ""
    pronunciation: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_tokens: int | None = None
    speed: float = 1.0
    duration: float | None = None
    carry_tone: bool = False
    timeline: bool = False
    segments: bool = False
    played: bool = True
    trim_reference: bool = False
    trim_silence: bool = True
    retry_bad_answers: bool = False
    pieces: AsyncIterator[str] | None = dataclasses.field(default=None, repr=False)
    source: Source | None = dataclasses.field(default=None, repr=False)

    @property
    def has_text(self) -> bool:
        """Return whether all that is to be spoken is known, as a text."""
        return self.pieces is None and self.source is None


@dataclass(frozen=True, kw_only=True)
class RequestRules:
    """What the requests of a server, or of another door to the same pipeline, are checked by.

    sampling, trim_silence, retry_bad_answers: of requests that ask for none. languages: those of the stack.
    """

    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_text_chars: int = OrchestratorConfig.max_text_chars
    languages: tuple[Language, ...] = EVERY
    trim_silence: bool = OrchestratorConfig.trim_silence
    retry_bad_answers: bool = OrchestratorConfig.retry_bad_answers

    def request(
        self,
        target_text: str | None,
        *,
        reference_wav: np.ndarray | None = None,
        reference_wav_len: int | None = None,
        reference_sample_rate: int | None = None,
        reference_text: str | None = None,
        speaker: str | None = None,
        instruct_text: str | None = None,
        source_wav: np.ndarray | None = None,
        source_sample_rate: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        pieces: AsyncIterator[Any] | None = None,
        on_warning: OnWarning = ignore,
    ) -> SynthesisRequest:
        """Return the validated request with these inputs, None for a missing one. pieces: where the text comes from,
        or the samples of `source_wav`. Raises ValueError naming the invalid value."""
        given = parameters or {}
        texts = {"target_text": target_text, "reference_text": reference_text, "instruct_text": instruct_text}
        self._require_lengths({**texts, "speaker": speaker}, given)
        for name in given:
            if name not in _PARAMETERS and not name.startswith(_TRITONS_OWN):
                raise ValueError(f"request parameter {name!r} is unknown; known: {', '.join(sorted(_PARAMETERS))}")
        speed = 1.0
        if "speed" in given:
            speed = _number("speed", given["speed"], float, constants.MIN_SPEED, constants.MAX_SPEED)
        voice = self._voice(reference_wav, reference_wav_len, reference_sample_rate, reference_text, speaker)
        if source_wav is not None:
            source = _source(
                source_wav, source_sample_rate, pieces, target_text=target_text, instruct_text=instruct_text
            )
            made = SynthesisRequest("", voice, speed=speed, source=source, trim_silence=False)  # it has its own pauses
            return dataclasses.replace(made, **_flags(given, _FLAGS))
        if target_text is None:
            raise ValueError("target_text is missing")
        instruct_text = self._instruction(
            instruct_text or "", target_text=target_text, reference_text=reference_text or ""
        )
        sampling, words = sampling_of(given, self.sampling), given.get("pronunciation")
        retry = self.retry_bad_answers and not sampling.repeatable
        own = {"trim_silence": self.trim_silence, "retry_bad_answers": retry}
        flags, reading = _flags(given, _FLAGS | _FLAGS_OF_SPEECH | own), _flags(given, _FLAGS_OF_READING)
        if instruct_text and flags["cross_lingual"]:
            raise ValueError(f"cross_lingual with the instruct_text {instruct_text!r}: use one of the two")
        target_text, marked = without_duration(target_text)
        if pieces is None:
            target_text = clean_text(target_text, name="target_text", max_chars=self.max_text_chars)
        if reference_text and flags["cross_lingual"]:
            raise ValueError(
                f"cross_lingual with the reference_text {reference_text!r}: the LLM would not use the text"
            )
        if pieces is None and (tags := left_out(target_text)):
            on_warning(f"tags were left out, as they mean nothing here: {', '.join(tags[:8])}")
        return SynthesisRequest(
            target_text=target_text if pieces is None else "",
            voice=voice,
            instruct_text=instruct_text,
            normalize=reading["text_frontend"],
            as_is=frozenset(filterfalse(reading.__getitem__, SPELLING)),
            language=named(str(given.get("language", "")), self.languages) or "",
            # The speech service sends those of a voice and of its folder with the request's own.
            pronunciation=pronunciations(words, max_words=3 * MAX_WORDS) if words is not None else {},
            sampling=sampling,
            max_tokens=sampling.max_tokens if "max_tokens" in given else None,
            pieces=pieces,
            speed=speed,
            duration=_duration(given, marked, live=pieces is not None),
            **flags,
        )

    def _require_lengths(self, texts: Mapping[str, str | None], parameters: Mapping[str, Any]) -> None:
        """Raise ValueError naming a text that is too long for anything to be done with it."""
        for of, limit, given in (("", self.max_text_chars, texts), ("request parameter ", MAX_FILE_BYTES, parameters)):
            for name, text in given.items():
                if isinstance(text, str) and len(text) > limit:
                    raise ValueError(f"{of}{name} has {len(text)} characters, more than the limit of {limit}")

    def _instruction(self, given: str, **texts: str) -> str:
        """Return `instruct_text`, or the words before `<|endofprompt|>` in one of the texts, as upstream's clients may
        send them."""
        found, where = "", "instruct_text"
        if given.strip():
            plain = strip_control_tokens(given)  # the token may end it
            found = clean_line(plain, name=where, max_chars=self.max_text_chars) if plain.strip() else ""
            if not found:
                raise ValueError(f"instruct_text has nothing to speak: {given!r}")
        for name, text in texts.items():
            if (written := split_instruction(text)[0]) and found and written != found:
                raise ValueError(
                    f"{where} {found!r}, and the instruction {written!r} before <|endofprompt|> in {name}: use one"
                )
            if written:
                found, where = written, f"the instruction in {name}"
        return found

    def _voice(
        self, wav: np.ndarray | None, length: int | None, rate: int | None, text: str | None, speaker: str | None
    ) -> Recording | str | None:
        """Return the recording or the speaker; None without either. ValueError if both are given."""
        if wav is not None:
            if speaker:
                raise ValueError(f"speaker {speaker!r} with a reference_wav: give only one voice")
            rate = constants.PROMPT_SAMPLE_RATE if rate is None else rate
            wav = validate_reference(wav, length, rate)
            said = clean_transcript(text or "", name="reference_text", max_chars=self.max_text_chars)[1]
            return Recording(wav, said, rate)
        of_recording = {"reference_text": text, "reference_wav_len": length, "reference_sample_rate": rate}
        for name, value in of_recording.items():
            if value not in (None, ""):
                raise ValueError(f"{name} {value!r} without a reference_wav")
        return speaker or None


def _source(wav: np.ndarray, rate: int | None, pieces: AsyncIterator[Any] | None, **texts: str | None) -> Source:
    for name, text in texts.items():
        if text:
            raise ValueError(f"{name} {text[:80]!r} with a source_wav, whose own words are spoken")
    rate = constants.PROMPT_SAMPLE_RATE if rate is None else rate
    return Source.of(wav, rate) if pieces is None else Source(pieces, rate, live=True)


def _duration(parameters: Mapping[str, Any], marked: float | None, *, live: bool) -> float | None:
    """Return the seconds that an answer is to have, by its parameter or its markup."""
    if (given := parameters.get("duration", marked)) is None:
        return None
    if live or "speed" in parameters:
        raise ValueError(f"duration {given} is for a whole text without a speed")
    seconds: float = _number("duration", given, float, constants.MIN_REFERENCE_SECONDS, constants.MAX_SOURCE_SECONDS)
    return seconds


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
    given = preset_values(str(parameters["sampling"])) if "sampling" in parameters else {}
    for name, kind in _SAMPLING_KINDS.items():
        if name in parameters:
            given[name] = _number(name, parameters[name], kind)
    return dataclasses.replace(defaults, **given)


def _flags(parameters: Mapping[str, Any], defaults: Mapping[str, bool]) -> dict[str, Any]:
    """Return parameters as booleans. Text is accepted because not every client can send a boolean parameter."""
    flags = dict(defaults)
    for name in defaults:
        if name in parameters:
            if (flag := BOOLEANS.get(str(value := parameters[name]).lower())) is None:
                raise ValueError(f"request parameter {name} must be true or false, not {value!r}")
            flags[name] = flag
    return flags


def _number(
    name: str, value: Any, kind: type[int] | type[float], least: float = -math.inf, most: float = math.inf
) -> Any:
    """Return `value` as `kind`, from `least` to `most`. Text is accepted because not every client can send a float
    parameter."""
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError
        number = kind(value)
        if not math.isfinite(number) or (isinstance(value, float) and number != value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        article = "an integer" if kind is int else "a number"
        raise ValueError(f"request parameter {name} must be {article}, not {value!r}") from None
    if not least <= number <= most:
        raise ValueError(f"request parameter {name} {number} is not in {least}..{most}")
    return number
