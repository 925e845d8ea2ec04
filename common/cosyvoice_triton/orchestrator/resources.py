"""What a request needs before its audio: a place in token2wav, and the prompt of its voice."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from cosyvoice_triton.constants import TOKEN_MEL_RATIO
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.tasks import TaskScope
from cosyvoice_triton.voice.mix import Mix
from cosyvoice_triton.voice.prompt import Prompt, PromptEncoder, Recording


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


@dataclass
class VoiceInUse:
    """A voice and its prompt. known: None while `parts`, the tasks of tokens, mel and x-vector, compute it."""

    voice: Recording | Prompt | Mix
    scope: TaskScope
    known: Prompt | None = None
    parts: Sequence[asyncio.Task[Any]] = ()

    def encode(self, source: Recording | Mix, encoder: PromptEncoder) -> None:
        """Begin to compute the prompt of `source`, which may be the voice's recording without its silence."""
        if isinstance(source, Mix):
            work = [_completed(source.tokens), _completed(source.mel), source.embedding(encoder.embedding)]
        else:
            work = [part(source) for part in (encoder.tokens, encoder.mel, encoder.embedding)]
        self.parts = [self.scope.spawn(part) for part in work]

    async def llm_tokens(self) -> list[int]:
        """Return the speech tokens that the LLM continues: those of the prompt, before its x-vector is known."""
        if self.known is not None:
            return self.known.tokens.tolist()
        tokens, mel = [await self.scope.result(part) for part in self.parts[:2]]
        return tokens[: len(mel) // TOKEN_MEL_RATIO].tolist()

    async def prompt(self) -> Prompt:
        """Return the prompt as soon as all of it is known. Raises what a network raises."""
        if self.known is None:
            tokens, mel, embedding = [await self.scope.result(part) for part in self.parts]
            self.known = Prompt.aligned(tokens, mel, embedding, self.voice.text, self.voice.instruction)
        return self.known


async def _completed(part: Any) -> Any:
    return part
