"""Typed fake ports of the pipeline. Each keeps a record of what was asked of it; audio tells which tokens made it."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.constants import MEL_BINS, PROMPT_SAMPLE_RATE, SPEAKER_DIM, TOKEN_MEL_RATIO
from common.llm.interface import FinishReason, LLMPrompt, Sampling, TokenChunk, TokenStream
from common.orchestrator.chunking import Chunk
from common.orchestrator.request import SpeechRequest
from common.voice.prompt import Prompt, Recording

PROMPT_TOKENS = 30
Step = list[int] | BaseException | asyncio.Event


def speech_request(voice: int = 0, text: str = "hello", reference_text: str = "reference") -> SpeechRequest:
    """A request whose reference samples all have the value `voice`."""
    recording = Recording(np.full(PROMPT_SAMPLE_RATE, voice, np.float32), reference_text)
    return SpeechRequest(text, recording, sampling=Sampling(seed=1))


def fake_prompt(voice: int, text: str = "reference") -> Prompt:
    """As the fake encoder makes it of a reference of that value."""
    return Prompt(
        np.full(PROMPT_TOKENS, voice, np.int64),
        np.full((PROMPT_TOKENS * TOKEN_MEL_RATIO, MEL_BINS), voice, np.float32),
        np.full(SPEAKER_DIM, voice, np.float32),
        text,
    )


class FakeTexts:
    """Segments of a text are between its bars; transcripts are as they are."""

    def segments(self, text: str, in_words: bool) -> Iterator[str]:
        yield from text.split("|")

    def transcript(self, text: str, in_words: bool) -> str:
        return text


@dataclass
class FakePromptEncoder:
    """Prompts whose tokens, mel and x-vector all are the reference's sample value.

    gates: name of a call -> event that it waits for. failures: name of a call -> what it raises.
    """

    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def tokens(self, wav: np.ndarray) -> np.ndarray:
        return await self._answer("tokens", np.full(PROMPT_TOKENS + 1, wav[0], np.int64))

    async def mel(self, wav: np.ndarray) -> np.ndarray:
        return await self._answer("mel", np.full((PROMPT_TOKENS * TOKEN_MEL_RATIO + 1, MEL_BINS), wav[0], np.float32))

    async def embedding(self, wav: np.ndarray) -> np.ndarray:
        return await self._answer("embedding", np.full(SPEAKER_DIM, wav[0], np.float32))

    async def _answer(self, name: str, value: np.ndarray) -> np.ndarray:
        self.begun.append(name)
        try:
            if name in self.gates:
                await self.gates[name].wait()
            if name in self.failures:
                raise self.failures[name]
        finally:
            self.ended.append(name)
        return value


class FakeLM:
    """Says `steps` to every prompt: tokens as they are, an event is waited for, an exception is raised."""

    def __init__(self, *steps: Step, finish_reason: FinishReason = "stop"):
        self.steps = steps
        self.finish_reason = finish_reason
        self.prompts: list[LLMPrompt] = []
        self.samplings: list[Sampling] = []
        self.open = 0  # streams that speak
        self.unclosed = 0

    def generate(self, prompt: LLMPrompt, sampling: Sampling) -> TokenStream:
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        return FakeTokenStream(self, self._speak(prompt))

    def script(self, prompt: LLMPrompt) -> Sequence[Step]:
        return self.steps

    async def aclose(self) -> None:
        assert self.open == self.unclosed == 0

    async def _speak(self, prompt: LLMPrompt) -> AsyncGenerator[TokenChunk, None]:
        self.open += 1
        try:
            for step in self.script(prompt):
                await asyncio.sleep(0)
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield TokenChunk(step)
            yield TokenChunk([], self.finish_reason)
        finally:
            self.open -= 1


class FakeTokenStream(TokenStream):
    def __init__(self, llm: FakeLM, chunks: AsyncGenerator[TokenChunk, None]):
        super().__init__(chunks)
        self._llm = llm
        llm.unclosed += 1

    async def aclose(self) -> None:
        await super().aclose()
        self._llm.unclosed -= 1


class FakeVocoder:
    """Audio of a token is one sample: 10000 times the voice plus the token.

    gate: chunks wait for it. failures: number of a stream's chunk, or "start" -> what it raises.
    """

    def __init__(self, gate: asyncio.Event | None = None, failures: dict[int | str, Exception] | None = None):
        self.gate = gate
        self.failures = failures or {}
        self.streams: list[FakeVocoderStream] = []
        self.offline_calls: list[tuple[list[int], float]] = []

    @property
    def live(self) -> int:
        return sum(stream.live for stream in self.streams)

    def open(self, prompt: Prompt) -> "FakeVocoderStream":
        self.streams.append(FakeVocoderStream(self, prompt))
        return self.streams[-1]

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float) -> np.ndarray:
        self.offline_calls.append((list(tokens), speed))
        return audio_of(prompt, tokens)


def audio_of(prompt: Prompt, tokens: Sequence[int]) -> np.ndarray:
    """(N,) of N tokens; the three parts of the prompt have to agree about the voice."""
    voice = int(prompt.tokens[0])
    assert prompt.mel[0, 0] == prompt.embedding[0] == voice
    return 10_000 * voice + np.asarray(tokens, np.float32)


class FakeVocoderStream:
    def __init__(self, vocoder: FakeVocoder, prompt: Prompt):
        self.prompt = prompt
        self.chunks: list[Chunk] = []
        self.started = False
        self.live = False
        self.aborts = 0
        self._vocoder = vocoder

    async def start(self) -> None:
        assert not self.started
        self.started = self.live = True
        await asyncio.sleep(0)
        if "start" in self._vocoder.failures:
            raise self._vocoder.failures["start"]

    async def chunk(self, tokens: Sequence[int], chunk: Chunk) -> np.ndarray:
        assert self.live and len(tokens) >= chunk.end_of_context
        self.chunks.append(chunk)
        await asyncio.sleep(0)
        if self._vocoder.gate is not None:
            await self._vocoder.gate.wait()
        if len(self.chunks) - 1 in self._vocoder.failures:
            raise self._vocoder.failures[len(self.chunks) - 1]
        self.live = not chunk.final
        return audio_of(self.prompt, tokens[chunk.offset : chunk.end])

    async def abort(self) -> None:
        if self.live:
            self.aborts += 1
            self.live = False
