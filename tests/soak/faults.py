"""Faults that a soak injects: processes killed and stopped, and those of monitoring/faults.py inside the models.

Each kind says which service it must end, if any, and what it explains: while it lasts, errors on the routes that it
concerns. It lasts from its injection until everything that it hit is ready again, and SETTLE_SECONDS longer.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from cosyvoice_triton.load.measure import RequestOutcome
from cosyvoice_triton.monitoring.faults import Fault

from tests.soak.cases import WEIGHTS
from tests.soak.routes import STREAMED, WHOLE
from tests.soak.sampling import family
from tests.soak.stack import LocalStack

Action = Literal["file", "kill", "stop", "hang"]

SETTLE_SECONDS = 5.0  # the speech service looks every 2 s whether Triton is there, and reconnects within 2 s
STOP_SECONDS = (2.0, 6.0)  # for which a process is stopped and then goes on
TAKEN_SECONDS = 60.0  # for a fault inside a model to happen, which needs a request at the right place
END_SECONDS = 60.0  # for a service to end after a fault that it does not survive: a hang is noticed after 15 s
SURVIVED_SECONDS = 15.0  # after which a service has survived a fault
GAP_SECONDS, GAP_SHARE = (8.0, 25.0), 0.1  # between the end of one fault and the next; at most this share of the run
HARD_SHARE = 0.5  # of the run, in which faults may end services; after it they do not, so that one life is long
HARD_PROBABILITY = 0.5  # of such a fault, in that share

MODELS = ("audio_tokenizer", "speaker_embedding", "tensorrt_llm", *STREAMED.models, *WHOLE.models)
TRITON_ROUTES = tuple(WEIGHTS)  # a dead Triton is behind every route
SPEECH_ROUTES = tuple(route for route in TRITON_ROUTES if route not in ("grpc", "grpc-offline"))


@dataclass(frozen=True)
class FaultKind:
    """file: `target` is a name of monitoring/faults.py. kill, stop: it is a process; hang: stopped for good.

    ends: the service that ends by it. survivable: it may also go on. errors: how many requests may fail by it, None:
    any number.
    """

    action: Action
    target: str
    ends: Literal["", "serve", "speech"] = ""
    survivable: bool = False
    errors: int | None = None

    @property
    def name(self) -> str:
        return f"{self.action} {self.target}"

    @property
    def end_seconds(self) -> float:
        """Return for how long a service may go on that ends by it."""
        return SURVIVED_SECONDS if self.survivable else END_SECONDS


FATAL: tuple[Fault, ...] = ("gpu_error", "token2wav_thread", "llm_thread")  # the model cannot go on
SOFT = (
    *(
        FaultKind("file", fault, errors=0 if fault == "out_of_memory" else 1)
        for fault in get_args(Fault)
        if fault not in FATAL
    ),
    *(FaultKind("stop", process) for process in ("tritonserver", "speech")),
)
HARD = (
    *(FaultKind("file", fault, ends="serve") for fault in FATAL),
    *(FaultKind("kill", process, ends="serve") for process in (*MODELS, "tritonserver", "serve")),
    FaultKind("kill", "speech", ends="speech"),
    # After a second Triton 2.51 gives up what it has sent to a model, and the model may crash on it when it goes on.
    *(FaultKind("stop", process, ends="serve", survivable=True) for process in MODELS),
    *(FaultKind("hang", process, ends="serve") for process in ("tensorrt_llm", STREAMED.token2wav)),
)


KINDS = {kind.name: kind for kind in (*SOFT, *HARD)}


def _shuffled(kinds: Sequence[FaultKind], random: np.random.Generator) -> Iterator[FaultKind]:
    """Endless; a new order each time all have been."""
    while True:
        yield from (kinds[index] for index in random.permutation(len(kinds)))


@dataclass
class InjectedFault:
    """One fault that was injected; times are of the run's clock. note: what was not as expected. failed: the servers
    did not do what they must do after it.
    """

    kind: FaultKind
    number: int
    begun: float
    ended: float | None = None
    note: str = ""
    failed: bool = False
    explained: int = 0

    @property
    def name(self) -> str:
        return f"{self.number}. {self.kind.name}"

    def explains(self, answer: RequestOutcome) -> bool:
        """Whether the request was under way while the fault lasted, on a route that it concerns; counts it."""
        routes = SPEECH_ROUTES if self.kind.target == "speech" else TRITON_ROUTES
        until = float("inf") if self.ended is None else self.ended
        within = answer.begun <= until and answer.ended >= self.begun
        if answer.server not in routes or not within or self.explained == self.kind.errors:
            return False
        self.explained += 1
        return True


@dataclass
class Injector:
    """Injects faults into a stack, one after another. until: the end of the run, by its clock. chosen: the kinds; all
    of them if empty.
    """

    stack: LocalStack
    clock: Callable[[], float]
    until: float
    chosen: Sequence[FaultKind]
    seed: int
    injected: list[InjectedFault] = field(default_factory=list)

    async def run(self) -> None:
        """Injects faults until it is cancelled.

        Chosen kinds come in their order; all kinds in random order, each once before any comes again.
        """
        random = np.random.default_rng((self.seed, 1 << 32))
        begun = self.clock()
        last_hard = begun + HARD_SHARE * (self.until - begun)
        shortest, longest = (min(gap, GAP_SHARE * (self.until - begun)) for gap in GAP_SECONDS)
        hard, soft = _shuffled(HARD, random), _shuffled(SOFT, random)
        chosen = itertools.cycle(self.chosen)
        while True:
            await asyncio.sleep(float(random.uniform(shortest, longest)))
            fatal = bool(random.random() < HARD_PROBABILITY) and self.clock() < last_hard
            kind = next(chosen if self.chosen else hard if fatal else soft)
            await self.inject(kind, float(random.uniform(*STOP_SECONDS)))

    async def inject(self, kind: FaultKind, pause: float) -> None:
        """Injects one fault and waits until everything is ready again. pause: for which a process is stopped."""
        fault = InjectedFault(kind, len(self.injected) + 1, self.clock())
        self.injected.append(fault)
        service = self.stack.services.get(kind.ends)
        lives = len(service.lives) if service else 0
        if service:
            service.expected_end = fault.name
        try:
            happened = await (self._in_a_model(kind) if kind.action == "file" else self._signal(kind, pause))
            if not happened:
                fault.note = "it did not happen"
            if service and not (happened and await self._becomes(lambda: len(service.lives) > lives, kind.end_seconds)):
                if happened and not kind.survivable:
                    raise RuntimeError(f"the service did not end within {kind.end_seconds:.0f} s")
                service.expected_end = ""
            await self.stack.wait_ready()
        except RuntimeError as error:
            fault.note, fault.failed = str(error), True
        finally:
            fault.ended = self.clock() + SETTLE_SECONDS
            for path in self.stack.faults.iterdir():
                path.unlink(missing_ok=True)
        await asyncio.sleep(SETTLE_SECONDS)

    async def _in_a_model(self, kind: FaultKind) -> bool:
        """Ask for a fault of monitoring/faults.py; return whether it has happened."""
        path = self.stack.faults / kind.target
        path.touch()
        return await self._becomes(lambda: not path.exists(), TAKEN_SECONDS)

    async def _signal(self, kind: FaultKind, pause: float) -> bool:
        process = self._process(kind.target)
        os.kill(process, signal.SIGKILL if kind.action == "kill" else signal.SIGSTOP)
        if kind.action == "stop":  # one that hangs is killed with its server
            try:
                await asyncio.sleep(pause)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)
        return True

    async def _becomes(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Return whether a condition becomes true in time."""
        deadline = self.clock() + seconds
        while not condition():
            if self.clock() > deadline:
                return False
            await asyncio.sleep(0.2)
        return True

    def _process(self, target: str) -> int:
        """Return the id of a process of the stack. RuntimeError if there is none."""
        for process, name in family(self.stack.roots()).items():
            if name == target:
                return int(process.pid)
        raise RuntimeError(f"there is no process {target}")
