"""One segment of a streamed answer: its chunks as token2wav renders them, judged and without silence at its ends. And
what it needs before: a place in token2wav, and the prompt of its voice."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cosyvoice_triton.audible import Playback, SilenceTrimmer
from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_MEL_RATIO
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.orchestrator.chunking import Hop, HopSchedule
from cosyvoice_triton.orchestrator.judges import Judge
from cosyvoice_triton.orchestrator.report import Events
from cosyvoice_triton.orchestrator.token2wav_port import Token2WavSequence
from cosyvoice_triton.orchestrator.token_buffer import TokenBuffer
from cosyvoice_triton.tasks import TaskScope
from cosyvoice_triton.voice.mix import Mix
from cosyvoice_triton.voice.prompt import Prompt, PromptEncoder, Recording


@dataclass(eq=False)
class SegmentRenderer:
    """Renders a segment, and from its beginning again if it is no speech and nothing of it was sent.

    stream: the one of token2wav that is open, to be aborted by the caller. trimmer: cuts the silence at the ends, if
    that is wanted.
    """

    stream: Token2WavSequence
    segment: TokenBuffer
    trims: bool
    judge: Judge
    clock: Callable[[], float]
    trimmer: SilenceTrimmer = field(default_factory=SilenceTrimmer)

    async def chunks(
        self, prompt: Prompt, schedule: HopSchedule, playback: Playback, scope: TaskScope, events: Events
    ) -> AsyncGenerator[tuple[Hop, np.ndarray], None]:
        """Yield the hops and what is to be sent of their audio, float32 (N,)."""
        segment, final, sent, left = self.segment, False, 0, None
        self.judge.begin()
        await scope.result(self.stream.start(prompt, playback.left(self.clock())))
        events.stage("prompt_cache")
        while not final:
            hop, waveform = await scope.result(self._next_hop(schedule)), None
            if hop is not None:
                events.stage("tokens")
                waveform = await scope.result(self.stream.render(segment.tokens, hop, left))
                events.stage("audio")
            if self.judge.makes_again(segment, waveform, final=hop is not None and hop.final, sent=sent):
                schedule.restart_segment()
                scope.spawn(segment.again())
                left, self.trimmer = None, SilenceTrimmer()
                await scope.result(self.stream.restart(prompt, playback.left(self.clock())))
                continue
            if hop is None or waveform is None:
                continue
            final, cut, left = hop.final, self.trimmer.cut, None
            if self.trims:
                waveform = self.trimmer.trimmed(waveform, final)
            sent += waveform.size
            if final:
                events.segment(segment.text, sent, segment.tokens)
            if waveform.size:
                yield hop, waveform
            if self.trimmer.cut > cut:  # then token2wav does not know what the listener has
                schedule.cut((self.trimmer.cut - cut) / SAMPLE_RATE)
                left = playback.left(self.clock()) or 0.0

    async def _next_hop(self, schedule: HopSchedule) -> Hop | None:
        """Return the next hop once its tokens are there; None if it is plain before that they are no speech."""
        # In one task of the scope: tokens come one by one, and each would cost a task.
        segment = self.segment
        while (hop := schedule.next_hop(len(segment.tokens), segment.ended)) is None:
            if self.judge.is_hopeless(segment):
                return None
            await segment.wait_for_change()
        return hop


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
