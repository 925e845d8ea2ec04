"""When a listener's place in token2wav is asked for."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.tasks import TaskScope


@dataclass
class Place:
    """A listener's place in token2wav, which is asked for once. reserve: None if nobody listens; then it is held from
    the beginning.

    Asking takes milliseconds, and usually there is a place. So it is asked for before the audio is rendered, once the
    LLM has started; before a new voice is encoded, which takes much longer and cannot be cancelled; or first of all,
    before the voice is read, in a crowd or if a listener was refused lately.
    """

    reserve: Callable[[], Coroutine[Any, Any, None]] | None
    scope: TaskScope
    asking: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Begin to ask for it, unless that was done."""
        if self.asking is None and self.reserve is not None:
            self.asking = self.scope.spawn(self.reserve())

    async def held(self) -> None:
        """Ask for it and wait for the answer. OverloadedError if it is refused."""
        self.ask()
        if self.asking is not None:
            await self.scope.result(self.asking)

    async def unless_refused(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`. Where the LLM is full, token2wav may be full, too: then its refusal is the error."""
        try:
            await work
        except UnavailableError:
            self.ask()
            if self.asking is not None:
                await self.asking
            raise
