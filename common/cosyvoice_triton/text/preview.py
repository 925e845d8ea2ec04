"""What will be spoken of a text, for people."""

from typing import Any

from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.language import language_of, named
from cosyvoice_triton.text.markup import Pause
from cosyvoice_triton.text.segments import expected_seconds


def preview(frontend: TextFrontend, text: str, language: str = "", **options: Any) -> dict[str, Any]:
    """Return `segments` ("" for a pause), the expected `seconds` of each and the `language` of the text; and, if there
    are any, `warnings` and `left_out`, a `text` and its `reason` each. `options` and errors are those of
    `TextFrontend.segments`."""
    warnings: list[str] = []
    left_out: list[dict[str, str]] = []

    def leave_out(written: str, reason: str) -> None:
        left_out.append({"text": written, "reason": reason})

    found = frontend.segments(text, language=language, on_warning=warnings.append, on_left_out=leave_out, **options)
    spoken = list(found)
    own = named(language) or language_of(text, None, frontend.languages)
    seconds = [
        part.seconds if isinstance(part, Pause) else expected_seconds(part, japanese=own == "ja") for part in spoken
    ]
    answer = {
        "segments": ["" if isinstance(part, Pause) else part for part in spoken],
        "seconds": [round(each, 2) for each in seconds],
        "language": own,
    }
    return answer | ({"warnings": warnings} if warnings else {}) | ({"left_out": left_out} if left_out else {})
