"""The pipeline from a request to its audio: prompt -> LLM -> chunks -> waveforms.

It knows the parts that do the work only as ports, and no server:

    voice -+-> speech tokens, mel --+--> LLM, read by its own task into a backlog --+
           +-> x-vector ------------|--> vocoder opened, prompt caches built -------+--> chunks --> waveforms
    text ----> segments ------------+

A text is spoken segment by segment, each by a request to the LLM and a stream of the vocoder of its own, both of which
hear the same voice. The LLM is one segment ahead of the vocoder, and no further.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from common.constants import TOKEN_MEL_RATIO
from common.errors import UnavailableError
from common.llm.interface import LLMPrompt, Sampling, SpeechLM, TokenStream
from common.llm.speech_tokens import instruction
from common.orchestrator.chunking import Chunk, HopRules, HopSchedule
from common.orchestrator.request import SpeechRequest
from common.tasks import TaskScope
from common.voice.prompt import Prompt, Recording, RecordingCache

logger = logging.getLogger(__name__)


class PromptEncoder(Protocol):
    """What the networks see of a reference (T,) float32 at 16 kHz. The three are asked for at the same time."""

    async def tokens(self, wav: np.ndarray) -> np.ndarray:
        """Speech ids (P,) 0..6560."""
        ...

    async def mel(self, wav: np.ndarray) -> np.ndarray:
        """(frames, 80) float32."""
        ...

    async def embedding(self, wav: np.ndarray) -> np.ndarray:
        """X-vector (192,)."""
        ...


class VocoderStream(Protocol):
    """One utterance, rendered chunk by chunk: `start` once, then the chunks in order, then `abort`."""

    async def start(self) -> None:
        """Build the caches of the prompt."""
        ...

    async def chunk(self, tokens: Sequence[int], chunk: Chunk) -> np.ndarray:
        """Audio (N,) float32 of `chunk`; `tokens` are all so far, at least `chunk.end_of_context`."""
        ...

    async def abort(self) -> None:
        """Free what is still held. Nothing to do after the final chunk or before `start`; raises nothing."""
        ...


class Vocoder(Protocol):
    """Speech tokens -> 24 kHz audio."""

    def open(self, prompt: Prompt) -> VocoderStream: ...

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float) -> np.ndarray:
        """Audio (N,) float32 of a whole utterance, at `speed` times the usual rate."""
        ...


class Texts(Protocol):
    """What the LLM is given to read, see `text.TextFrontend`; asked in a thread."""

    def segments(self, text: str, in_words: bool) -> Iterator[str]: ...

    def transcript(self, text: str, in_words: bool) -> str: ...


class Voices(Protocol):
    """Registered voices by name, see `voices.VoiceBook.get`; asked in a thread."""

    def __call__(self, name: str) -> Recording | Prompt: ...


Warn = Callable[[str], object]  # told what the caller should know although there is audio

# Told each stage when it is reached: "voice", once what the LLM hears of the voice is known; then for each segment
# "llm", its first tokens, and "vocoder", the voice's caches; for each chunk "tokens", all that it needs, and "audio".
Note = Callable[[str], object]


def _nobody(word: str) -> None:
    """Nobody is told; the log has warnings all the same."""


class TokenBacklog:
    """Speech tokens of one segment: the LLM's stream fills it, the chunks use it up."""

    def __init__(self, target_text: str, warn: Warn, note: Note) -> None:
        self.tokens: list[int] = []
        self.ended = False
        self._target_text = target_text
        self._warn = warn
        self._note = note
        self._news = asyncio.Event()

    async def fill(self, stream: TokenStream) -> None:
        """Read `stream` to its end and close it, however this ends. No token at all is an UnavailableError."""
        try:
            async for tokens in stream:
                if not self.tokens:
                    self._note("llm")
                self.tokens.extend(tokens)
                self._news.set()
        finally:
            await stream.aclose()
        if not self.tokens:
            raise UnavailableError(f"the LLM returned no speech token for the text {self._target_text[:80]!r}")
        if stream.finish_reason == "length":
            warning = (
                f"speech was cut short after {len(self.tokens)} tokens, the most that max_tokens and max_token_ratio "
                f"allow: {self._target_text[:80]!r}"
            )
            logger.warning(warning)
            self._warn(warning)
        self.ended = True
        self._news.set()

    async def complete(self) -> None:
        """Wait for the end."""
        while not self.ended:
            await self.more()

    async def more(self) -> None:
        """Wait for tokens or the end, unless some came since the last wait."""
        await self._news.wait()
        self._news.clear()


# Segments of a request; None is the end. One may wait, so that the LLM is no further ahead than that one.
Backlogs = asyncio.Queue[TokenBacklog | None]


class Synthesizer:
    """Turns requests into audio. Requests share nothing but the ports and what is known of the voices."""

    def __init__(
        self,
        texts: Texts,
        voices: Voices,
        encoder: PromptEncoder,
        llm: SpeechLM,
        vocoder: Vocoder,
        rules: HopRules,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._texts = texts
        self._voices = voices
        self._encoder = encoder
        self._llm = llm
        self._vocoder = vocoder
        self._rules = rules
        self._clock = clock
        self._prompts = RecordingCache()

    async def stream(
        self, request: SpeechRequest, warn: Warn = _nobody, note: Note = _nobody
    ) -> AsyncGenerator[np.ndarray, None]:
        """Waveforms (N,) float32 as they become ready. Closing the generator ends everything begun for it.

        `warn` is called before the last one where speech was cut short, `note` as `Note` says.

        Raises what a port raises, as soon as it does, UnavailableError where the LLM says nothing, and ValueError
        for a speed other than 1.
        """
        if request.speed != 1.0:
            raise ValueError(f"speed {request.speed} is for whole utterances; a streamed one is spoken at speed 1")
        async with TaskScope() as scope:
            prompt, backlogs = await self._begin(request, scope, warn, note)
            while (backlog := await scope.result(backlogs.get())) is not None:
                async with aclosing(self._rendered(prompt, backlog, scope, note)) as waveforms:
                    async for waveform in waveforms:
                        yield waveform

    async def offline(self, request: SpeechRequest, warn: Warn = _nobody) -> np.ndarray:
        """The whole utterance, (N,) float32. Warns and raises as `stream` does."""
        async with TaskScope() as scope:
            prompt, backlogs = await self._begin(request, scope, warn, _nobody)
            waveforms = []
            while (backlog := await scope.result(backlogs.get())) is not None:
                await scope.result(backlog.complete())
                waveforms.append(await scope.result(self._vocoder.offline(prompt, backlog.tokens, request.speed)))
            return np.concatenate(waveforms)

    async def _rendered(
        self, prompt: Prompt, backlog: TokenBacklog, scope: TaskScope, note: Note
    ) -> AsyncGenerator[np.ndarray, None]:
        """The waveforms of one segment."""
        vocoder = self._vocoder.open(prompt)
        try:
            await scope.result(vocoder.start())
            note("vocoder")
            schedule = self._rules.schedule(len(prompt.tokens), self._clock)
            final = False
            while not final:
                chunk = await scope.result(_next_chunk(schedule, backlog))
                note("tokens")
                waveform = await scope.result(vocoder.chunk(backlog.tokens, chunk))
                note("audio")
                yield waveform
                final = chunk.final
        finally:
            await vocoder.abort()

    async def _begin(self, request: SpeechRequest, scope: TaskScope, warn: Warn, note: Note) -> tuple[Prompt, Backlogs]:
        """Find or encode the voice, and set the LLM going as soon as its part of the voice is known."""
        texts = self._texts.segments(request.target_text, request.in_words)
        first = scope.spawn(_next(texts))
        named = request.voice
        voice = named if isinstance(named, Recording) else await scope.result(asyncio.to_thread(self._voices, named))
        transcript = scope.spawn(asyncio.to_thread(self._texts.transcript, voice.text, request.in_words))
        known = voice if isinstance(voice, Prompt) else self._prompts.get(voice)
        tokens, mel, embedding = self._encoded(known or voice, scope)
        llm_prompt = LLMPrompt("", instruction(request.instruct_text) if request.instruct_text else "")
        if voice.text and not (request.instruct_text or request.cross_lingual):
            # As many tokens as Prompt.aligned will keep.
            spoken = (await scope.result(tokens))[: len(await scope.result(mel)) // TOKEN_MEL_RATIO]
            llm_prompt = LLMPrompt("", await scope.result(transcript), spoken.tolist())
        note("voice")
        backlogs: Backlogs = asyncio.Queue(maxsize=1)
        backlog_of = partial(TokenBacklog, warn=warn, note=note)
        scope.spawn(self._speak(first, texts, llm_prompt, request.sampling, backlogs, backlog_of))
        prompt = Prompt.aligned(
            await scope.result(tokens), await scope.result(mel), await scope.result(embedding), voice.text
        )
        if known is None and isinstance(voice, Recording):
            self._prompts.put(voice, prompt)
        return prompt, backlogs

    def _encoded(self, voice: Recording | Prompt, scope: TaskScope) -> list[asyncio.Task[np.ndarray]]:
        """Tokens, mel and x-vector, each on its way."""
        if isinstance(voice, Prompt):
            return [scope.spawn(_known(part)) for part in (voice.tokens, voice.mel, voice.embedding)]
        encoder = self._encoder
        return [scope.spawn(part(voice.wav)) for part in (encoder.tokens, encoder.mel, encoder.embedding)]

    async def _speak(
        self,
        first: asyncio.Task[str | None],
        rest: Iterator[str],
        llm_prompt: LLMPrompt,
        sampling: Sampling,
        backlogs: Backlogs,
        backlog_of: Callable[[str], TokenBacklog],
    ) -> None:
        """Fill a backlog for each text, one after another."""
        text = await first
        while text is not None:
            backlog = backlog_of(text)
            await backlogs.put(backlog)
            await backlog.fill(self._llm.generate(replace(llm_prompt, target_text=text), sampling))
            text = await _next(rest)
        await backlogs.put(None)


async def _next_chunk(schedule: HopSchedule, backlog: TokenBacklog) -> Chunk:
    """The next chunk, once the LLM has made its tokens."""
    while (chunk := schedule.next_chunk(len(backlog.tokens), backlog.ended)) is None:
        await backlog.more()
    return chunk


async def _next(texts: Iterator[str]) -> str | None:
    """The next text, made in a thread; None at the end."""
    return await asyncio.to_thread(next, texts, None)


async def _known(part: np.ndarray) -> np.ndarray:
    return part
