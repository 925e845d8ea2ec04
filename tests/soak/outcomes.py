"""How every request of a run ended: exactly once.

done        a whole answer
cancelled   by the client, as planned
rejected    bad input, with the answer that it should get
refused     the server is full and says so
failed      an error that an injected fault explains
lost        anything else: another error, another answer than expected, an answer without audio
hung        nothing for a minute
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from cosyvoice_triton.load.measure import RequestOutcome

if TYPE_CHECKING:
    from tests.soak.faults import InjectedFault

Outcome = Literal["done", "cancelled", "rejected", "refused", "failed", "lost", "hung"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
LINE_SECONDS = 30.0
LEAST_SECONDS = 0.1  # of audio in a whole answer

# What a full server says: limits of the speech service, the orchestrator's models and the LLM.
_FULL = re.compile(
    r"HTTP 429|RESOURCE_EXHAUSTED|overloaded, retry after|try later or on another server|the limit of open sessions"
    r"|already serves its maximum|queue is full|no room for another voice"
)


@dataclass(frozen=True)
class Settled:
    """A request, how it ended, and the fault that explains an error; "" for none."""

    answer: RequestOutcome
    outcome: Outcome
    fault: str = ""


def settled(answers: Iterable[RequestOutcome], faults: "Iterable[InjectedFault]") -> list[Settled]:
    """Return every request with its outcome, in the order of their ends; each fault counts the errors it explains."""
    found = []
    faults = sorted(faults, key=lambda fault: fault.kind.errors is not None)  # first those that explain any number
    for answer in answers:
        if not answer.error and answer.seconds < LEAST_SECONDS:
            answer = replace(answer, error=f"a whole answer of {answer.seconds:.3f} s of audio")
        outcome, fault = _outcome(answer), ""
        if outcome == "lost":
            fault = next((fault.name for fault in faults if fault.explains(answer)), "")
        found.append(Settled(answer, "failed" if fault else outcome, fault))
    return found


def _outcome(answer: RequestOutcome) -> Outcome:
    """Return how a request ended, of an error "lost", as if no fault explained it."""
    if answer.ending != "failed":
        return answer.ending
    return "refused" if _FULL.search(answer.error) else "lost"


class Lines:
    """A load's observer, which prints how it gets on to standard error, a line every LINE_SECONDS.

    clock: of the run. seconds: of the load. loaded: when it began.
    """

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self.loaded = 0.0
        self._clock, self._seconds, self._next = clock, seconds, 0.0
        self._counts: Counter[Outcome] = Counter()

    def begins(self, phase: str) -> None:
        self.loaded = self._clock()
        self._show(0)

    def ended(self, outcome: RequestOutcome, live: int) -> None:
        self._counts[_outcome(outcome)] += 1
        self._show(live)

    def _show(self, live: int) -> None:
        if (elapsed := self._clock() - self.loaded) < self._next:
            return
        self._next += LINE_SECONDS
        counts = self._counts
        state = f"{counts.total()} requests, {live} live, {counts['done']} done, {counts['lost']} errors"
        print(f"{elapsed:.0f} of {self._seconds:.0f} s: {state}", file=sys.stderr, flush=True)
