"""Every request of a run, and how it ended: exactly once.

done        a whole answer
cancelled   by the client, as planned
rejected    bad input, with the answer that it should get
refused     the server is full and says so
failed      an error that an injected fault explains
lost        anything else: another error, another answer than expected, an answer without audio
hung        nothing for `patience` seconds
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from tests.soak.faults import InjectedFault

Outcome = Literal["done", "cancelled", "rejected", "refused", "failed", "lost", "hung"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
BAD_OUTCOMES: tuple[Outcome, ...] = ("lost", "hung")

# What a full server says: limits of the speech service, the orchestrator's models and the LLM.
_FULL = re.compile(
    r"HTTP 429|RESOURCE_EXHAUSTED|overloaded, retry after|try later or on another server|the limit of open sessions"
    r"|already serves its maximum|queue is full|no room for another voice"
)


@dataclass
class Request:
    """One request. Times are seconds since the start of the run.

    number: of its case, see `cases`. first: when the first audio or answer came. outcome: None until it is settled;
    an error is settled by `Ledger.settle`, when it is known how long each fault lasted. fault: that explains it.
    """

    number: int
    route: str
    what: str
    begun: float
    first: float | None = None
    ended: float | None = None
    outcome: Outcome | None = None
    reason: str = ""
    fault: str = ""

    @property
    def answered(self) -> bool:
        """Whether the server is up and not full."""
        return self.outcome not in (None, "refused")


@dataclass
class Ledger:
    """All requests, in the order in which they began."""

    requests: list[Request] = field(default_factory=list)

    def open(self, number: int, route: str, what: str, now: float) -> Request:
        self.requests.append(Request(number, route, what, now))
        return self.requests[-1]

    def close(self, request: Request, outcome: Outcome | None, reason: str, now: float) -> None:
        """Notes that the request has ended; `outcome` None: with an error."""
        if request.ended is not None:
            raise AssertionError(f"request {request.number} ended twice: {request.outcome}, then {outcome} ({reason})")
        if outcome is None and _FULL.search(reason):
            outcome = "refused"
        request.ended, request.outcome, request.reason = now, outcome, reason

    def settle(self, faults: "Iterable[InjectedFault]") -> None:
        """Settle every error: failed if one of the faults explains it, otherwise lost. What never ended has hung."""
        faults = sorted(faults, key=lambda fault: fault.limited)
        for request in self.requests:
            if request.ended is None:
                request.outcome, request.reason = "hung", "the run ended without an answer"
            elif request.outcome is None:
                request.fault = next((fault.name for fault in faults if fault.explains(request)), "")
                request.outcome = "failed" if request.fault else "lost"

    @property
    def errors(self) -> int:
        """Requests that have ended with an error and are not settled yet."""
        return sum(request.ended is not None and request.outcome is None for request in self.requests)

    def counts(self) -> Counter[str]:
        """Requests by outcome, once all are settled."""
        return Counter(request.outcome for request in self.requests if request.outcome)

    def offenders(self) -> list[Request]:
        """Return the lost and hung requests."""
        return [request for request in self.requests if request.outcome in BAD_OUTCOMES]
