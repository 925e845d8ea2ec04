"""The fields of a request's body, and the models' names for them."""

import re

from cosyvoice_triton.config import SamplingPreset

SAMPLING = ("seed", "sampling", *SamplingPreset._fields, "max_tokens")  # request parameters of the same names

_INPUTS = {
    "target_text": "input",
    "instruct_text": "instructions",
    "reference_text": "ref_text",
    "reference_wav": "ref_audio",
    "nor a speaker": "nor a voice",
}
_FIELDS = (*_INPUTS.values(), *SAMPLING, "voice", "speed", "language", "pronunciation", "trim_reference")
_INPUT = re.compile(rf"\b({'|'.join(_INPUTS)})\b")
_BEGINS_WITH = {"request parameter ": "", "unknown speaker ": "voice ", "speaker ": "voice ", "no voice": "voice"}


def named(message: str) -> tuple[str, str | None]:
    """Return a model's message about a request in the words of the body, and the field that it begins with, if any."""
    message = _INPUT.sub(lambda found: _INPUTS[found[0]], message)
    about = message
    for words, field in _BEGINS_WITH.items():
        if about.startswith(words):
            about = field + about.removeprefix(words)
    first = about.partition(" ")[0].rstrip(":")
    return message, first if first in _FIELDS else None
