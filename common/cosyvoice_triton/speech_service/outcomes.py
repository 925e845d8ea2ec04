"""What became of the answers, for a caller who asks later."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.security.guard import API_KEY

KEPT_SECONDS = 600.0
MOST = 4096  # the oldest are forgotten first
MAX_WARNINGS = 8


class Outcomes:
    """The answers under way and those that ended lately, by the id that their caller has."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, str, SpeechAnswer | dict[str, Any]]] = OrderedDict()

    def begin(self, name: str, answer: SpeechAnswer) -> None:
        """Take note of an answer that is being made."""
        self._put(name, answer.key, answer)

    def end(self, name: str, answer: SpeechAnswer, status: str, error: ApiError | None = None) -> None:
        """Take note of how it ended: completed, failed, aborted after its first byte, or gone, as its caller is."""
        self._put(name, answer.key, _about(answer, status) | (error.body if error else {}))

    def of(self, name: str) -> dict[str, Any]:
        """Return what is known of an answer. ApiError for one of another key, and for one that is not known."""
        self._forget()
        _, key, found = self._known.get(name, (0.0, "", None))
        if found is None or key != API_KEY.get():
            raise ApiError(404, f"no answer {name[:80]!r} in the last {KEPT_SECONDS / 60:.0f} minutes", param="id")
        return {"id": name, **(found if isinstance(found, dict) else _about(found, "in_progress"))}

    def _put(self, name: str, key: str, about: SpeechAnswer | dict[str, Any]) -> None:
        self._known.pop(name, None)
        self._known[name] = (self._clock(), key, about)
        self._forget()

    def _forget(self) -> None:
        while self._known:
            name, (at, _, _) = next(iter(self._known.items()))
            if at >= self._clock() - KEPT_SECONDS and len(self._known) <= MOST:
                return
            del self._known[name]


def _about(answer: SpeechAnswer, status: str) -> dict[str, Any]:
    return {"status": status, "usage": answer.usage, "warnings": answer.warnings[:MAX_WARNINGS]}
