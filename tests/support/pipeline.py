"""The pipeline over fakes, for the tests of `synthesis`."""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.orchestrator.chunking import Hop, HopRules
from cosyvoice_triton.orchestrator.report import Events, OnWarning, ignore
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.orchestrator.synthesis import Instructions, Synthesizer
from cosyvoice_triton.voice.mix import Mix
from cosyvoice_triton.voice.prompt import Prompt, Recording

from tests.random_weights.llm import build_tokenizer
from tests.support.fakes import FakeLM, FakePromptEncoder, FakeTextPreparer, FakeToken2Wav, Step, speech_request


@cache
def demo_tokenizer() -> LLMTokenizer:
    tokenizer = build_tokenizer()
    ids = [tokenizer.token_to_id(token) for token in ("<|s_0|>", "<|eos1|>", "<|sos|>", "<|task_id|>")]
    return LLMTokenizer(tokenizer, ids[0], (ids[1],), *ids[2:])


class FakeVoices(dict[str | None, Recording | Prompt | Mix]):
    """Registered voices without dictionaries."""

    def get(self, name: str | None) -> Recording | Prompt | Mix:  # type: ignore[override]
        return self[name]

    def pronunciation(self, voice: Recording | str | None) -> dict[str, str]:
        return {}


@dataclass(eq=False)
class Pipeline:
    """A synthesizer over fakes; a block, or `run`, checks that it leaves no running task or open stream."""

    llm: FakeLM
    encoder: FakePromptEncoder = field(default_factory=FakePromptEncoder)
    token2wav: FakeToken2Wav = field(default_factory=FakeToken2Wav)
    rules: HopRules = HopRules()
    clock: Callable[[], float] = time.monotonic
    long_silence: Collection[int] = ()
    silent_tokens: Collection[int] = ()
    judges: bool = False
    instructions: Instructions = "with transcript"
    voices: FakeVoices = field(default_factory=FakeVoices)
    texts: FakeTextPreparer = field(default_factory=FakeTextPreparer)

    @cached_property
    def synthesizer(self) -> Synthesizer:
        ports = (self.texts, self.voices, self.encoder, self.llm, demo_tokenizer(), self.token2wav)
        silences = (self.long_silence, self.silent_tokens, self.judges)
        return Synthesizer(*ports, self.rules, self.clock, *silences, self.instructions)

    async def synthesize(
        self, request: SynthesisRequest | None = None, on_warning: OnWarning = ignore
    ) -> list[np.ndarray]:
        async with aclosing(self.synthesizer.stream(request or speech_request(), Events(on_warning))) as waveforms:
            return [waveform async for waveform in waveforms]

    async def offline(
        self, request: SynthesisRequest | None = None, on_warning: OnWarning = ignore
    ) -> list[np.ndarray]:
        """The same as one waveform."""
        return [await self.synthesizer.offline(request or speech_request(), Events(on_warning))]

    async def __aenter__(self) -> "Pipeline":
        self._tasks = asyncio.all_tasks()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert asyncio.all_tasks() == self._tasks
        assert self.llm.open == 0
        assert self.token2wav.live == 0
        assert sorted(self.encoder.started) == sorted(self.encoder.ended)

    def run(self, speech: Coroutine[None, None, list[np.ndarray]] | None = None) -> list[np.ndarray]:
        async def main() -> list[np.ndarray]:
            async with self:
                return await (speech or self.synthesize())

        return asyncio.run(main())

    @property
    def hops(self) -> list[Hop]:
        return self.token2wav.streams[0].hops


Speak = Callable[[Pipeline, SynthesisRequest], Coroutine[None, None, list[np.ndarray]]]


async def run_until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; fails after 10 s."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0)


async def settle() -> None:
    """Let every task go on as far as it can without other threads."""
    for _ in range(50):
        await asyncio.sleep(0)


def one_by_one(total: int) -> list[Step]:
    return [[token] for token in range(total)]
