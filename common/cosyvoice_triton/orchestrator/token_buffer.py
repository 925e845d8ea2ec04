"""The speech tokens of a segment, between the LLM and the chunks."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cosyvoice_triton.constants import MAX_STREAM_TOKENS, ONSET_TOKENS, TOKEN_RATE
from cosyvoice_triton.llm.interface import MAX_SEED, FinishReason, LLMPrompt, Sampling, SpeechLM, TokenChunk
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.orchestrator.report import Events
from cosyvoice_triton.text.segments import expected_seconds

logger = logging.getLogger(__name__)

# An answer is continued up to this many times the expected duration of its text, and some seconds for the pauses of a
# short text. Slow speech is at half the usual rate; what takes longer does not speak the text any more.
RUNAWAY_FACTOR, RUNAWAY_SECONDS = 2.0, 2.0
CUT_SHORT = "speech was cut short"  # the beginning of these warnings
MAX_SILENT_TOKENS = 5  # spoken of a run: 0.2 s, as upstream


@dataclass(eq=False)
class SilenceFilter:
    """Drops silent tokens of one segment, which may arrive in any grouping. The LLM's own context keeps them.

    long: the ids in 0..6560 of which a run is shortened, because the LLM sometimes says nothing for seconds. Source:
    `llm_job` of upstream's CosyVoice3 model. leading: those that are dropped before the first other token.
    """

    long: Collection[int]
    leading: Collection[int] = ()
    _run: int = 0  # silent tokens since the last other one, dropped ones included
    _onset: list[int] | None = field(default_factory=list)  # the last leading ones; None once another token came

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """Return those of the tokens that arrived next that are to be spoken."""
        kept = []
        for token in tokens:
            if self._onset is not None:
                if token in self.leading:
                    self._onset = [*self._onset, token][-ONSET_TOKENS:]
                    continue
                kept += self.rest()
            self._run = self._run + 1 if token in self.long else 0
            if self._run <= MAX_SILENT_TOKENS:
                kept.append(token)
        return kept

    def rest(self) -> list[int]:
        """Return the last of the tokens that were held back, at the end of a segment that is silent throughout."""
        rest, self._onset = self._onset or [], None
        return rest


class TokenBuffer:
    """Speech tokens of one segment: the LLM's answers append them, the chunks read them.

    pause: seconds of silence before it. text: what the LLM has got of it. tokens: those that are spoken; generated:
    all that the LLM has made, of the current attempt.
    """

    def __init__(self, events: Events, new_filter: Callable[[], SilenceFilter], pause: float = 0.0) -> None:
        self.pause = pause
        self.text = ""
        self.tokens: list[int] = []
        self.generated: list[int] = []
        self.ended = False
        self._new_filter = new_filter
        self._refill: Callable[[], Coroutine[Any, Any, int]] | None = None
        self._events = events
        self._silence = new_filter()
        self._changed = asyncio.Event()

    async def fill(self, llm: SpeechLM, prompt: LLMPrompt, sampling: Sampling, left: int | None) -> int:
        """Read the LLM's answer to `prompt`, and return its number of tokens. Where it ends by its length, the LLM is
        asked to continue it, up to `left` tokens if the request has a limit.

        Warns if it is not continued. ValueError if there is no token at all: the same text would fail again.
        """
        other = None if sampling.seed is None else (sampling.seed + 1) % (MAX_SEED + 1)
        self._refill = partial(self.fill, llm, prompt, replace(sampling, seed=other), left)
        text = self.text = prompt.target_text
        # By max_token_ratio alone 18 s of text may become 50 s of speech.
        most = round(TOKEN_RATE * (RUNAWAY_FACTOR * expected_seconds(text) + RUNAWAY_SECONDS))
        limit, why = min(MAX_STREAM_TOKENS, max(sampling.max_tokens, most)), "the most for a text of its length"
        if left is not None and left < limit:
            limit, why = left, "what max_tokens of the request allows"
        generated = self.generated
        reason: FinishReason | None = "length"
        while reason == "length":
            done = len(generated)
            asked = min(sampling.max_tokens, limit - done)
            part = replace(sampling, max_tokens=asked, min_tokens=min(asked, max(0, sampling.min_tokens - done)))
            if sampling.seed is not None:  # other random numbers than before, or every part could end in the same loop
                part = replace(part, seed=(sampling.seed + done) % (MAX_SEED + 1))
            try:
                answer = llm.generate(replace(prompt, generated=tuple(generated)), part)
                reason = await self._read(answer, generated)
            except ValueError as error:  # such as a prompt that no longer fits the LLM's context
                if not done:
                    raise
                self._warn(f"{done} tokens, because the LLM cannot continue it ({error}): {text[:80]!r}")
                break
            if generated is not self.generated:
                return len(generated)
            if not generated:
                raise ValueError(f"the LLM returned no speech token for the text {text[:80]!r}")
            if reason == "length" and (len(generated) < done + asked or len(generated) >= limit):
                self._warn(f"{len(generated)} tokens, {why}: {text[:80]!r}")
                break
        self._end()
        return len(generated)

    def again(self) -> Coroutine[Any, Any, int]:
        """Drop the answer to `fill`, and return the work that fills the buffer with another one."""
        assert self._refill is not None
        self.generated, self.ended, self._silence = [], False, self._new_filter()
        self.tokens.clear()
        return self._refill()

    async def noted(self, pieces: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        """Yield `pieces`, which become the segment's text."""
        async for piece in pieces:
            self.text += piece
            yield piece

    async def read(self, answer: AsyncGenerator[TokenChunk, None], stage: str) -> None:
        """Read the whole segment from `answer`, whose first tokens are a stage of this name. Warns if it was cut short;
        ValueError if there is no token at all."""
        generated = self.generated
        reason = await self._read(answer, generated, stage)
        if not generated:
            raise ValueError("the LLM returned no speech token for the text in pieces")
        if reason == "length":
            self._warn(f"{len(generated)} tokens, the most for its text in pieces or what max_tokens allows")
        self._end()

    def _end(self) -> None:
        self.tokens.extend(self._silence.rest())
        self.ended = True
        self._changed.set()

    async def _read(
        self, answer: AsyncGenerator[TokenChunk, None], generated: list[int], stage: str = "llm"
    ) -> FinishReason | None:
        """Append the tokens of `answer` to `generated`, and to the buffer what the chunks get of them. Return why it
        has ended."""
        reason: FinishReason | None = None
        with tracing.span(stage):
            async with aclosing(answer):
                async for chunk in answer:
                    if generated is not self.generated:  # it was dropped
                        break
                    reason = chunk.finish_reason
                    if chunk.tokens:
                        if not generated:
                            self._events.stage(stage)
                        generated += chunk.tokens
                        self.tokens.extend(self._silence.kept(chunk.tokens))
                        self._changed.set()
        return reason

    def _warn(self, after: str) -> None:
        warning = f"{CUT_SHORT} after {after}"
        logger.warning(warning)
        self._events.warning(warning)

    async def wait_for_end(self) -> None:
        while not self.ended:
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait for tokens or the end; return at once if either came since the last wait."""
        await self._changed.wait()
        self._changed.clear()
