"""Every request of a run, and how it ended: exactly once.

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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from cosyvoice_triton.load.measure import RequestOutcome

if TYPE_CHECKING:
    from tests.soak.faults import InjectedFault

Outcome = Literal["done", "cancelled", "rejected", "refused", "failed", "lost", "hung"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
BAD_OUTCOMES: tuple[Outcome, ...] = ("lost", "hung")
LINE_SECONDS = 30.0
LEAST_SECONDS = 0.1  # of audio in a whole answer

# What a full server says: limits of the speech service, the orchestrator's models and the LLM.
_FULL = re.compile(
    r"HTTP 429|RESOURCE_EXHAUSTED|overloaded, retry after|try later or on another server|the limit of open sessions"
    r"|already serves its maximum|queue is full|no room for another voice"
)


@dataclass
class Request:
    """One request. begun, ended: seconds since the start of the run. outcome: None until it is settled; an error is
    settled by `Ledger.settle`, when it is known how long each fault lasted. fault: that explains it.
    """

    answer: RequestOutcome
    begun: float
    outcome: Outcome | None
    fault: str = ""

    @property
    def route(self) -> str:
        return self.answer.server

    @property
    def ended(self) -> float:
        return self.begun + self.answer.total


@dataclass
class Ledger:
    """All requests, in the order in which they ended: a load's observer.

    clock: of the run. seconds: of the load, of which a line is printed every LINE_SECONDS. loaded: when it began.
    """

    clock: Callable[[], float] = lambda: 0.0
    seconds: float = 0.0
    requests: list[Request] = field(default_factory=list)
    loaded: float = 0.0
    next_line: float = 0.0

    def begins(self, phase: str) -> None:
        self.loaded = self.clock()
        self._show(0)

    def ended(self, outcome: RequestOutcome, live: int) -> None:
        if not outcome.error and outcome.seconds < LEAST_SECONDS:
            outcome = replace(outcome, error=f"a whole answer of {outcome.seconds:.3f} s of audio")
        verdict: Outcome | None = None if outcome.error else "done"
        if outcome.cancelled or outcome.rejected or outcome.hung:
            verdict = "cancelled" if outcome.cancelled else "rejected" if outcome.rejected else "hung"
        elif _FULL.search(outcome.error):
            verdict = "refused"
        self.requests.append(Request(outcome, self.loaded + outcome.begun, verdict))
        self._show(live)

    def _show(self, live: int) -> None:
        """Print how the load gets on to standard error."""
        if (elapsed := self.clock() - self.loaded) < self.next_line:
            return
        self.next_line += LINE_SECONDS
        state = f"{len(self.requests)} requests, {live} live, {self.counts()['done']} done, {self.errors} errors"
        print(f"{elapsed:.0f} of {self.seconds:.0f} s: {state}", file=sys.stderr, flush=True)

    def settle(self, faults: "Iterable[InjectedFault]") -> None:
        """Settle every error: failed if one of the faults explains it, otherwise lost."""
        faults = sorted(faults, key=lambda fault: fault.limited)
        for request in self.requests:
            if request.outcome is None:
                request.fault = next((fault.name for fault in faults if fault.explains(request)), "")
                request.outcome = "failed" if request.fault else "lost"

    @property
    def errors(self) -> int:
        """Requests that have ended with an error and are not settled yet."""
        return sum(request.outcome is None for request in self.requests)

    def counts(self) -> Counter[str]:
        """Requests by outcome, once all are settled."""
        return Counter(request.outcome for request in self.requests if request.outcome)

    def offenders(self) -> list[Request]:
        """Return the lost and hung requests."""
        return [request for request in self.requests if request.outcome in BAD_OUTCOMES]
