"""The limits of what callers send, each defined once: of the fields by their types, of the rest by a number here.

A field's length is checked before anything else is done with it. The OpenAPI document has each limit, because it is
made of the same types; tests/speech_service/test_openapi.py finds a field that has none. A limit that is a setting is
declared by that setting's name (`by_setting`). What a connection may send is in `security/connection_limits.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Path
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from cosyvoice_triton.speech_service.errors import invalid
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.text.pronunciation import (
    MAX_FILE_BYTES,
    MAX_READING_CHARS,
    MAX_WORD_CHARS,
    MAX_WORDS,
    pronunciations,
)

NAME_CHARS = 256  # of names, formats and languages
MAX_FIELDS = 64  # of a body: about twice as many as SpeechRequest has
MAX_ITEMS = 128  # of a realtime conversation, of which only the last is spoken: the oldest are forgotten
MAX_ID_CHARS = 64  # of the realtime protocol's ids, which come back in each event
MAX_METADATA = 16, 64, 512  # pairs, characters of a name and of a value, as OpenAI's
# An LLM writes faster than its text is spoken, so sentences and ended utterances wait; an hour of speech is enough.
MAX_WAITING_CHARS = 65_536
MAX_WAITING_UTTERANCES = 64
MAX_WAITING_CONVERSIONS = 8  # utterances of a session, each of up to MAX_SOURCE_SECONDS
MAX_DICTIONARY_CHARS = MAX_FILE_BYTES  # of a dictionary as text
MAX_NUMBERS = 3 << 19  # of JSON in Triton's protocol, somewhat more than those of the longest recording


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} is half of a surrogate pair") from None
    return text


def _words(given: Any) -> dict[str, str]:
    if isinstance(given, str) and len(given) > MAX_DICTIONARY_CHARS:
        raise ValueError(f"it has {len(given)} characters, more than the limit of {MAX_DICTIONARY_CHARS}")
    return pronunciations(given)  # as text in a form


Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[str, Field(max_length=NAME_CHARS)]  # also rejects what cannot be encoded
PathName = Annotated[str, Path(max_length=NAME_CHARS)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]  # what Triton's protocol can carry
Finite = Annotated[float, Field(allow_inf_nan=False)]
Words = Annotated[
    dict[Annotated[Text, Field(max_length=MAX_WORD_CHARS)], Annotated[Text, Field(max_length=MAX_READING_CHARS)]],
    Field(max_length=MAX_WORDS),
    BeforeValidator(_words),
]

_LENGTHS = {"maxLength": "characters", "maxItems": "items"}  # of JSON schemas, and what they count


def by_setting(name: str, counts: str = "maxLength") -> dict[str, Any]:
    """Return the limit of a field, for its `json_schema_extra`: the value of that setting."""
    return {counts: name}


def require_lengths(model: type[BaseModel], fields: Mapping[str, Any], settings: Settings) -> None:
    """Raise ApiError for a body with too many fields, or naming a field that is longer than its setting allows."""
    if len(fields) > MAX_FIELDS:
        raise invalid(f"the body has {len(fields)} fields, more than the limit of {MAX_FIELDS}")
    for name, field in model.model_fields.items():
        declared = field.json_schema_extra
        for counts, what in _LENGTHS.items():
            setting = declared.get(counts) if isinstance(declared, dict) else None
            value = fields.get(name)
            if isinstance(setting, str) and isinstance(value, str | list) and len(value) > getattr(settings, setting):
                message = f"{name} has {len(value)} {what}, more than the limit of {getattr(settings, setting)}"
                raise invalid(message, name, "string_above_max_length")


def with_settings(schema: Any, settings: Settings) -> Any:
    """Return a JSON schema, or a document of them, with the values of the settings that limits name."""
    if isinstance(schema, list):
        return [with_settings(each, settings) for each in schema]
    if not isinstance(schema, dict):
        return schema
    known = {name: with_settings(each, settings) for name, each in schema.items()}
    return known | {
        counts: getattr(settings, known[counts]) for counts in _LENGTHS if isinstance(known.get(counts), str)
    }
