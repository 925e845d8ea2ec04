"""Request bodies: OpenAI's fields and our extensions."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from cosyvoice_triton.client.utterance import Utterance, of_recording
from cosyvoice_triton.constants import LOUDEST, QUIETEST
from cosyvoice_triton.errors import json_kind
from cosyvoice_triton.llm.interface import preset_values
from cosyvoice_triton.speech_service.audio.recordings import decode_base64
from cosyvoice_triton.speech_service.audio.timestamps import Detail, Subtitles
from cosyvoice_triton.speech_service.errors import SAMPLING, invalid, naming
from cosyvoice_triton.speech_service.limits import (
    MAX_FIELDS,
    Finite,
    Int64,
    Name,
    Text,
    Words,
    by_setting,
    require_lengths,
)
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.voices import VoiceFolder
from cosyvoice_triton.text.language import language_of, named
from cosyvoice_triton.text.markup import VoicePart, by_voice
from cosyvoice_triton.text.pronunciation import combined
from cosyvoice_triton.voice.mix import mixed_voices
from cosyvoice_triton.voice.prompt import Recording

# OpenAI's model names are accepted for the default model, so that programs work unchanged.
OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
_VERSION = re.compile(r"-(\d{4}-\d{2}-\d{2}|\d{4})$")  # tts-1-1106, gpt-4o-mini-tts-2025-12-15

# Kokoro's letters for languages -> those that `language` knows.
_LANG_CODES = {"a": "en", "b": "en", "j": "ja", "z": "zh", "e": "es", "f": "fr", "i": "it", "h": "", "p": ""}

# What a JSON body may consist of besides base64: punctuation, which takes the parser a hundred times as long per byte.
_BASE64 = bytes(range(ord("0"), ord("9") + 1)) + bytes(range(ord("A"), ord("Z") + 1)) + b"+/=-_\\"
_CHEAP = _BASE64 + _BASE64.lower() + bytes(range(128, 256))
_INT64_DIGITS = 20  # with the sign

# Types of fields whose limits are settings.
InputText = Annotated[Text, Field(json_schema_extra=by_setting("max_input_chars"))]
EncodedAudio = Annotated[str, Field(json_schema_extra=by_setting("max_reference_chars"))]

# Names of types that pydantic puts into an error's location for a field of several types, as if they were fields.
_TYPES = ("str", "constrained-str", "VoiceId")


def is_openai_model(name: str) -> bool:
    """Return whether `name` is one of OPENAI_MODELS, perhaps with a date."""
    return _VERSION.sub("", name.lower()) in OPENAI_MODELS


class VoiceId(BaseModel):
    """OpenAI's other form of the field `voice`."""

    model_config = ConfigDict(extra="forbid")

    id: Name


class NormalizationOptions(BaseModel):
    """Kokoro's field. Units and symbols are words whenever `normalize` is true; the last three change nothing."""

    model_config = ConfigDict(extra="forbid")

    normalize: bool = True
    url_normalization: bool = True
    email_normalization: bool = True
    phone_normalization: bool = True
    unit_normalization: bool = True
    optional_pluralization_normalization: bool = True
    replace_remaining_symbols: bool = True

    def parameters(self) -> dict[str, bool]:
        """Return the request parameters of a model that differ from their defaults."""
        wanted = {"text_frontend": self.normalize} | self.model_dump(
            include={"url_normalization", "email_normalization", "phone_normalization"}
        )
        return {name: False for name, value in wanted.items() if not value}


class SpeechRequest(BaseModel):
    """The body of POST /v1/audio/speech. Unknown fields are rejected, so that misspelled ones are noticed."""

    model_config = ConfigDict(extra="forbid")

    input: InputText = Field(description="the text to speak")
    model: Name = Field("", description="a served model, or one of OpenAI's names; empty: the default")
    voice: Name | VoiceId = Field(
        "",
        description="a registered voice, also called `speaker`; ignored if ref_audio is given",
        validation_alias=AliasChoices("voice", "speaker"),  # vllm-omni's
    )
    response_format: Name = Field(
        "mp3",
        description="mp3, opus, aac, flac, wav, pcm (16-bit little-endian), at 8 kHz mulaw, alaw, mulaw_wav, alaw_wav",
    )
    frame_ms: Int64 | None = Field(None, description="of pcm, mulaw, alaw: send pieces of exactly 10, 20, … ms")
    pace: Literal["realtime"] | None = Field(None, description="with frame_ms: send each piece when it is to be played")
    speed: Finite = Field(1.0, description="0.25 to 4; the pitch is kept")
    duration: Finite | None = Field(None, description="seconds of the whole answer, by a speed of 0.7 to 1.4")
    carry_tone: bool = Field(False, description="speak each segment on in the tone of the one before")
    instructions: InputText = Field("", description='how to speak, such as "Speak slowly."')
    stream_format: Literal["audio", "sse", "json"] = Field(
        "audio", description="sse: events; json: the whole answer as one object, with the audio in base64"
    )
    no_words: Literal["silence", "error"] = Field(
        "silence", description="of a text without words, such as an emoji: a short silence and a warning, or an error"
    )
    timestamps: Detail | None = Field(None, description="when each segment or word is spoken; not with audio alone")
    subtitles: Subtitles | None = Field(None, description="a file of subtitles with the answer; not with audio alone")
    stream: bool = Field(True, description="false: the answer is sent when it is complete, with its length")
    return_download_link: Literal[False] = Field(False, description="Kokoro's; nothing is stored to be downloaded")
    volume_multiplier: Finite = Field(1.0, description="above 0, at most 10; what is then too loud is clipped")
    loudness: Finite | None = Field(
        None, ge=QUIETEST, le=LOUDEST, description="LUFS by EBU R128, such as -16, below -1 dBFS; else the voice's own"
    )
    normalization_options: NormalizationOptions = Field(NormalizationOptions(), description="Kokoro's")
    ref_audio: EncodedAudio = Field(
        "", description="the voice: an audio file in base64, or an upload of a multipart request"
    )
    ref_text: InputText = Field("", description="transcript of ref_audio; without it, cross-lingual cloning is used")
    trim_reference: bool = Field(False, description="cut a recording's silence at its ends to 0.2 s, mend its end")
    trim_silence: bool | None = Field(None, description="false: keep the silence that the model makes at both ends")
    retry_bad_answers: bool | None = Field(
        None, description="make an answer again that begins with silence, a loop or noise; without a seed it is"
    )
    language: Name = Field("", description="of the input; else guessed; a voice of another is cloned cross-lingually")
    pronunciation: Words = Field({}, description="words of the input, and what is spoken for each")
    lang_code: Name = Field("", description="Kokoro's name of the field language, or its letters: a, b, e, f, i, j, z")
    sample_rate: Int64 | None = Field(None, description="of the answer, in Hz")
    seed: Int64 | None = Field(None, description="the same seed gives the same speech tokens")
    sampling: Name | None = Field(None, description="preset of the next six fields: cosyvoice2 or triton")
    temperature: Finite | None = Field(None, description="of the LLM; lower is steadier")
    top_p: Finite | None = Field(None, description="share of the probability that tokens are drawn from")
    top_k: Int64 | None = Field(None, description="number of the likeliest tokens that one is drawn from")
    repetition_penalty: Finite | None = Field(None, description="above 1: tokens that were drawn become rarer")
    ras_window: Int64 | None = Field(None, description="tokens that repetition-aware sampling looks back; 0 is off")
    ras_tau: Finite | None = Field(None, description="share of these from which a token is replaced")
    max_tokens: Int64 | None = Field(None, description="speech tokens per request to the LLM, 25 per second")

    @property
    def complete(self) -> bool:
        """Return whether the answer is sent when it is complete."""
        return not self.stream or self.stream_format == "json"

    @property
    def named_language(self) -> str:
        """Return the language that the request names; "" if it is to be guessed."""
        return self.language or self.lang_code

    def flags(self, words: Mapping[str, str]) -> dict[str, bool | str]:
        """Return a model's request parameters, but the sampling, that differ from their defaults. `words`: the
        dictionary of the voice."""
        words = combined(self.pronunciation, words)
        wanted = {
            "language": self.named_language or None,
            "duration": None if self.duration is None else str(self.duration),
            "carry_tone": self.carry_tone or None,
            "pronunciation": json.dumps(words, ensure_ascii=False) if words else None,
            "trim_reference": self.trim_reference or None,
            "trim_silence": self.trim_silence,
            "retry_bad_answers": self.retry_bad_answers,
            "played": False if self.complete else None,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        return given | self.normalization_options.parameters()

    @field_validator("sampling")
    @classmethod
    def _is_preset(cls, sampling: str) -> str:
        preset_values(sampling)
        return sampling

    @field_validator("response_format")
    @classmethod
    def _in_small_letters(cls, name: str) -> str:
        return name.lower()

    @field_validator("lang_code")
    @classmethod
    def _as_language_tag(cls, code: str) -> str:
        return _LANG_CODES.get(code.lower(), code)

    @field_validator("language", "lang_code")
    @classmethod
    def _is_language_tag(cls, language: str) -> str:
        return named(language) or ""

    def served_model(self, default: str) -> str:
        """Return the model to call; empty: any that is served."""
        return default if not self.model or is_openai_model(self.model) else self.model

    @property
    def voice_name(self) -> str:
        return self.voice if isinstance(self.voice, str) else self.voice.id


_OF_CONVERSIONS = (
    *("model", "voice", "response_format", "speed", "stream_format", "stream", "volume_multiplier", "loudness"),
    "ref_audio",
    *("trim_reference", "sample_rate", "frame_ms", "pace"),
)
_SOURCE: Any = Field("", description="the speech: an audio file in base64, or an upload of a multipart request")
_CONVERSION: dict[str, Any] = {
    "audio": (EncodedAudio, _SOURCE),
    **{name: (each.annotation, each) for name, each in SpeechRequest.model_fields.items() if name in _OF_CONVERSIONS},
}
# The body of POST /v1/audio/voice-conversion: the fields of SpeechRequest that are not about a text.
ConversionRequest = create_model("ConversionRequest", __config__=ConfigDict(extra="forbid"), **_CONVERSION)


class BatchRequest(BaseModel):
    """The body of POST /v1/audio/speech/batch: the other fields are defaults for each of `items`."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"maxProperties": MAX_FIELDS})

    items: list[Any] = Field(
        min_length=1,
        description="objects with the fields of SpeechRequest; any other is an error of that item",
        json_schema_extra={
            **by_setting("max_batch", "maxItems"),
            "items": {"type": "object", "maxProperties": MAX_FIELDS},
        },
    )

    def requests(self) -> list[Any]:
        defaults = self.model_extra or {}
        return [{**defaults, **item} if isinstance(item, dict) else item for item in self.items]


def read_json(data: bytes, what: str, settings: Settings) -> dict[str, Any]:
    """Return the JSON object in `data` without fields that are null, which many clients send for those that they leave
    out.

    `what` names it in messages. ApiError, also if reading it would take long.
    """
    if len(data.translate(None, _CHEAP)) > settings.max_json_chars:
        raise invalid(f"{what} has more than {settings.max_json_chars} characters besides letters, digits and base64")
    try:
        fields = _given(json.loads(data, parse_int=_integer))
    except RecursionError:
        raise invalid(f"{what} has objects or lists inside of one another, too many levels of them") from None
    except ValueError as error:
        raise invalid(f"{what} is not JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(fields, dict):
        raise invalid(f"{what} is {json_kind(fields)}, not a JSON object")
    return fields


def _integer(digits: str) -> int | float:
    """Return a number that JSON has; one with more digits than any field takes as a float, because calculating with
    thousands of digits takes long or fails."""
    return int(digits) if len(digits) <= _INT64_DIGITS else float(digits)


def _given(value: Any) -> Any:
    """Return `value` without fields that are null, also inside of objects and lists."""
    if isinstance(value, list):
        return [_given(each) for each in value]
    if isinstance(value, dict):
        return {name: _given(each) for name, each in value.items() if each is not None}
    return value


def parse(model: type[BaseModel], fields: Mapping[str, Any], settings: Settings) -> Any:
    """Return `fields` as an instance of `model`; ApiError naming the invalid field."""
    require_lengths(model, fields, settings)
    with _naming_fields():
        return model.model_validate(fields)


def parse_json(model: type[BaseModel], data: bytes) -> Any:
    """Return the JSON in `data` as an instance of `model`, checked while it is read; ApiError likewise."""
    with _naming_fields():
        return model.model_validate_json(data)


@contextlib.contextmanager
def _naming_fields() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        of_field = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
        first = max(of_field, key=lambda each: len(each["loc"]))  # inside of an object, if it is one
        where = ".".join(part for part in map(str, first["loc"]) if part not in _TYPES and "[" not in part)
        wrong = "unknown field, see docs/http.md" if first["type"] == "extra_forbidden" else first["msg"]
        message = f"{where or 'the body'}: {wrong.removeprefix('Value error, ')}"
        raise invalid(message, param=where.partition(".")[0] or None) from None


def utterances(
    wanted: SpeechRequest, decode_upload: Callable[[], Recording] | None, voices: VoiceFolder, settings: Settings
) -> tuple[Utterance, ...]:
    """Return the requests to a model, one for each part of the text between changes of the voice or the length;
    otherwise as `utterance`.

    A voice that the text names must be registered here, so that an unknown one is an error before any audio.
    """
    own = utterance(wanted, decode_upload, voices, settings)
    with naming("input"):
        parts = by_voice(wanted.input)
    if not parts:  # the model says so
        return (replace(own, target_text=""),)
    lengths = [part.seconds for part in parts if part.seconds is not None]
    if wanted.duration is not None and (lengths or len(parts) > 1):
        raise invalid(f"duration {wanted.duration:g} is for a text in one voice, without segments", "duration")
    if wanted.speed != 1.0 and (wanted.duration is not None or lengths):
        raise invalid(f"speed {wanted.speed:g} is for a text without a duration", "speed")
    known = {"": own}
    if len(parts) > 1 and own.reference is None and wanted.voice_name and any(not part.voice for part in parts):
        _require(wanted.voice_name, voices, "voice")
    for name in dict.fromkeys(part.voice for part in parts):
        if name:
            _require(name, voices, "input")
            named = wanted.model_copy(update={"voice": name, "ref_audio": "", "ref_text": ""})
            known[name] = utterance(named, None, voices, settings)
    return tuple(_part(known[part.voice], part) for part in parts)


def _part(whole: Utterance, part: VoicePart) -> Utterance:
    of_length = {} if part.seconds is None else {"duration": str(part.seconds)}
    return replace(whole, target_text=part.text, parameters={**whole.parameters, **of_length})


def _require(name: str, voices: VoiceFolder, field: str) -> None:
    try:
        voices.get(voices.resolve(name))
    except ValueError as error:
        raise invalid(f"{error}; a text with several voices needs registered ones", field) from None


def utterance(
    wanted: SpeechRequest, decode_upload: Callable[[], Recording] | None, voices: VoiceFolder, settings: Settings
) -> Utterance:
    """Return the request to a model, in its own voice; ApiError naming the invalid field. Reads files, not for an event
    loop.

    decode_upload: returns an uploaded recording or raises ValueError; None without an upload.
    """
    if not wanted.input.strip():
        raise invalid("input is empty", "input")
    if decode_upload is not None or wanted.ref_audio:
        _refuse_mix(wanted.voice_name, voices)
    recording = _reference(wanted, decode_upload, settings.max_reference_bytes)
    if recording is not None:
        voice = {**of_recording(recording), "reference_text": wanted.ref_text.strip() or None}
    elif wanted.ref_text:
        raise invalid("ref_text without ref_audio", "ref_text")
    else:
        voice = _registered(wanted.voice_name, voices)
    # Floats as text, which the models accept: Triton 2.51 has no float parameters.
    sampling = {name: value for name in SAMPLING if (value := getattr(wanted, name)) is not None}
    parameters = {name: str(value) if isinstance(value, float) else value for name, value in sampling.items()}
    parameters |= wanted.flags(voice.pop("pronunciation", {}))
    transcript = voice.pop("transcript", "") or voice.get("reference_text")
    # In another language than its own, a voice is cloned without its transcript, which the LLM would continue.
    if wanted.named_language and transcript and language_of(transcript) not in (None, wanted.named_language):
        if voice.pop("reference_text", None) is None:
            parameters["cross_lingual"] = True
    if wanted.loudness is not None:
        voice["loudness"] = wanted.loudness
    instructions = wanted.instructions.strip() or None
    if instructions and recording is None:
        voice.pop("reference_text", None)  # the instruction replaces it
        parameters.pop("cross_lingual", None)
    voice |= {"instruct_text": instructions} if instructions else {}
    return Utterance(target_text=wanted.input, parameters=parameters, **voice)


def _reference(
    wanted: SpeechRequest, decode_upload: Callable[[], Recording] | None, max_bytes: int
) -> Recording | None:
    with naming("ref_audio"):
        if decode_upload is not None:
            return decode_upload()
        return decode_base64(wanted.ref_audio, max_bytes) if wanted.ref_audio else None


def _registered(name: str, voices: VoiceFolder) -> dict[str, Any]:
    """Return the utterance's fields for a registered voice; none for an empty name, which means the model's default
    voice."""
    if not name:
        return {}
    name = voices.resolve(name)
    try:
        voice = voices.get(name)
    except ValueError:  # the models may have other voices
        return {"speaker": name}
    if isinstance(voice, Recording):
        words = voices.pronunciation(name)
        style = {"instruct_text": voice.instruction or None, "loudness": voice.loudness}
        return {**of_recording(voice), "reference_text": voice.text or None, "pronunciation": words, **style}
    return {"speaker": name, "transcript": voice.text, "loudness": voice.loudness}


def _refuse_mix(name: str, voices: VoiceFolder) -> None:
    """Raise ApiError if a request with a recording names a mix. Other names are ignored, since OpenAI's SDK requires
    one."""
    with naming("voice"):
        mixed = mixed_voices(name) and name not in voices.names()
    if mixed:
        raise invalid(f"voice {name!r} with a ref_audio: a recording cannot be mixed", "voice")
