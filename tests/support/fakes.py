"""Typed fake ports of the pipeline. Each records its calls; audio encodes the tokens that it was made from."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cosyvoice_triton.constants import MEL_BINS, PROMPT_SAMPLE_RATE, SPEAKER_DIM, TOKEN_MEL_RATIO
from cosyvoice_triton.llm.interface import FinishReason, LLMPrompt, Sampling, TokenChunk
from cosyvoice_triton.orchestrator.chunking import Hop
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.voice.prompt import Prompt, Recording

PROMPT_TOKENS = 30
Step = list[int] | BaseException | asyncio.Event


def speech_request(voice: int = 0, text: str = "hello", reference_text: str = "reference") -> SynthesisRequest:
    """A request whose reference is known by its samples, which the fake encoder reads as `voice`."""
    recording = Recording(np.full(PROMPT_SAMPLE_RATE, 0.1 + voice / 1000, np.float32), reference_text)
    return SynthesisRequest(text, recording, sampling=Sampling(seed=1))


def fake_prompt(voice: int, text: str = "reference") -> Prompt:
    """The prompt that the fake encoder makes from a reference of that value."""
    return Prompt(
        np.full(PROMPT_TOKENS, voice, np.int64),
        np.full((PROMPT_TOKENS * TOKEN_MEL_RATIO, MEL_BINS), voice, np.float32),
        np.full(SPEAKER_DIM, voice, np.float32),
        text,
    )


@dataclass
class FakeTextPreparer:
    """Segments of a text are separated by bars, or are `parts` whatever the text; transcripts stay unchanged."""

    parts: Iterable[Any] | None = None

    def segments(self, text: str, normalize: bool, request_seconds: float, *rest: object) -> Iterator[Any]:
        yield from text.split("|") if self.parts is None else self.parts

    def transcript(self, text: str, normalize: bool) -> str:
        return text


def _value(recording: Recording) -> int:
    return max(0, round(1000 * (float(recording.wav[0]) - 0.1)))


@dataclass
class FakePromptEncoder:
    """Prompts whose tokens, mel and x-vector all have the reference's sample value.

    gates: name of a call -> event that it waits for. failures: name of a call -> the exception that it raises.
    """

    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def tokens(self, recording: Recording) -> np.ndarray:
        return await self._answer("tokens", np.full(PROMPT_TOKENS + 1, _value(recording), np.int64))

    async def mel(self, recording: Recording) -> np.ndarray:
        shape = PROMPT_TOKENS * TOKEN_MEL_RATIO + 1, MEL_BINS
        return await self._answer("mel", np.full(shape, _value(recording), np.float32))

    async def embedding(self, recording: Recording) -> np.ndarray:
        return await self._answer("embedding", np.full(SPEAKER_DIM, _value(recording), np.float32))

    async def _answer(self, name: str, value: np.ndarray) -> np.ndarray:
        self.started.append(name)
        try:
            if name in self.gates:
                await self.gates[name].wait()
            if name in self.failures:
                raise self.failures[name]
        finally:
            self.ended.append(name)
        return value


class FakeLM:
    """Answers every prompt with `steps`: tokens are yielded, events waited for, exceptions raised."""

    def __init__(self, *steps: Step, finish_reason: FinishReason = "stop"):
        self.steps = steps
        self.finish_reason = finish_reason
        self.prompts: list[LLMPrompt] = []
        self.samplings: list[Sampling] = []
        self.open = 0  # streams being generated

    def script(self, prompt: LLMPrompt) -> Sequence[Step]:
        return self.steps

    async def aclose(self) -> None:
        assert self.open == 0

    async def generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        self.prompts.append(prompt)
        self.samplings.append(sampling)
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


@dataclass(eq=False)
class FakeToken2Wav:
    """The audio of a token is one sample: 10000 times the voice plus the token.

    gate: hops wait for it. failures: index of a stream's hop, "reserve" or "start" -> the exception that it raises.
    """

    gate: asyncio.Event | None = None
    failures: dict[int | str, Exception] = field(default_factory=dict)
    streams: list["FakeToken2WavStream"] = field(default_factory=list)
    offline_calls: list[tuple[list[int], float]] = field(default_factory=list)

    @property
    def live(self) -> int:
        return sum(stream.live for stream in self.streams)

    def open(self, speed: float = 1.0) -> "FakeToken2WavStream":
        self.streams.append(FakeToken2WavStream(self, speed))
        return self.streams[-1]

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float) -> np.ndarray:
        self.offline_calls.append((list(tokens), speed))
        return audio_of(prompt, tokens)


def audio_of(prompt: Prompt, tokens: Sequence[int]) -> np.ndarray:
    """(N,) of N tokens; asserts that the three parts of the prompt are of the same voice."""
    voice = int(prompt.embedding[0])
    assert (prompt.tokens == voice).all() and (prompt.mel == voice).all()
    return 10_000 * voice + np.asarray(tokens, np.float32)


@dataclass(eq=False)
class FakeToken2WavStream:
    token2wav: FakeToken2Wav
    speed: float
    reserved: bool = False
    restarts: int = 0
    hops: list[Hop] = field(default_factory=list)
    lefts: list[float | None] = field(default_factory=list)  # with each hop
    started: bool = False
    live: bool = False
    aborts: int = 0
    audio_left: float | None = None

    def following(self) -> "FakeToken2WavStream":
        return self.token2wav.open(self.speed)

    async def reserve(self) -> None:
        assert not self.live
        self.reserved = self.live = True
        await asyncio.sleep(0)
        if "reserve" in self.token2wav.failures:
            self.live = False
            raise self.token2wav.failures["reserve"]

    async def start(self, prompt: Prompt, audio_left: float | None) -> None:
        assert not self.started
        self.prompt = prompt
        self.audio_left = audio_left
        self.started = self.live = True
        await asyncio.sleep(0)
        if "start" in self.token2wav.failures:
            raise self.token2wav.failures["start"]

    async def restart(self, prompt: Prompt, audio_left: float | None) -> None:
        assert self.started
        self.started, self.restarts = False, self.restarts + 1
        await self.start(prompt, audio_left)

    async def render(self, tokens: Sequence[int], hop: Hop, audio_left: float | None = None) -> np.ndarray:
        assert self.live and len(tokens) >= hop.end_of_context
        self.hops.append(hop)
        self.lefts.append(audio_left)
        await asyncio.sleep(0)
        if self.token2wav.gate is not None:
            await self.token2wav.gate.wait()
        if len(self.hops) - 1 in self.token2wav.failures:
            raise self.token2wav.failures[len(self.hops) - 1]
        self.live = not hop.final
        return audio_of(self.prompt, tokens[hop.offset : hop.offset + hop.length])

    async def abort(self) -> None:
        if self.live:
            self.aborts += 1
            self.live = False
