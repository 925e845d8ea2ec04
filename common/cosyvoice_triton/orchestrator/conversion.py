"""Speech to convert to another voice: its speech tokens take the place of the LLM's, as in upstream's `inference_vc`.

A recording of up to WINDOW_TOKENS is encoded as a whole. Of a longer one, and of speech that somebody speaks now,
windows are encoded: the tokens at a window's end are left to the next one, which knows what follows them, and each has
some of the tokens before its own as context.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.constants import (
    MAX_REFERENCE_SECONDS,
    MAX_SOURCE_SECONDS,
    MAX_STREAM_TOKENS,
    MIN_REFERENCE_SECONDS,
    TOKEN_RATE,
)
from cosyvoice_triton.llm.interface import TokenChunk
from cosyvoice_triton.voice.prompt import Recording, validate_reference, validate_samples

WINDOW_TOKENS = int(MAX_REFERENCE_SECONDS * TOKEN_RATE)  # what the speech tokenizer reads at once


class Windows(NamedTuple):
    """context: tokens before a window's own. ahead: tokens after them, which the next window has anew."""

    context: int
    ahead: int


RECORDED = Windows(context=50, ahead=50)  # as the package s3tokenizer
LIVE = Windows(context=200, ahead=5)
LIVE_STEP = 9  # new tokens of a window: the first one lasts 0.56 s, and the tokenizer refuses less than half a second


@dataclass(frozen=True)
class Source:
    """Speech to convert: pieces (N,) float32 at `rate` Hz as they come. live: somebody speaks them now, and hears the
    answer meanwhile. Iterating over the pieces may raise ValueError."""

    pieces: AsyncIterator[np.ndarray]
    rate: int
    live: bool

    @classmethod
    def of(cls, wav: np.ndarray, rate: int) -> "Source":
        """Return a whole recording, (N,) or (1, N). ValueError naming what is wrong with it."""
        wav = validate_reference(wav, rate=rate, of="source", max_seconds=MAX_SOURCE_SECONDS)

        async def whole() -> AsyncGenerator[np.ndarray, None]:
            yield wav

        return cls(whole(), rate, live=False)

    async def tokens(self, encode: Callable[[Recording], Awaitable[np.ndarray]]) -> AsyncGenerator[TokenChunk, None]:
        """Yield its speech tokens like an LLM. encode: speech ids (P,) of a recording of up to WINDOW_TOKENS.

        ValueError for pieces that cannot be used, or if all of them are too short.
        """
        size = self.rate // TOKEN_RATE  # samples of a token
        windows = LIVE if self.live else RECORDED
        wav = np.zeros(0, np.float32)  # from the token `begin` on
        begin = done = 0
        async for piece in self.pieces:
            wav = np.concatenate([wav, validate_samples(piece, self.rate, "source")])
            while (end := self._settled(begin, done, begin + len(wav) // size)) > done:
                found = await encode(Recording(wav[: (end + windows.ahead - begin) * size], rate=self.rate))
                yield TokenChunk(found[done - begin : end - begin].tolist())
                done, first = end, max(begin, end - windows.context)
                wav, begin = wav[(first - begin) * size :], first
        if not done and len(wav) < MIN_REFERENCE_SECONDS * self.rate:
            raise ValueError(f"source_wav lasts {len(wav) / self.rate:g} s: expected {MIN_REFERENCE_SECONDS} s or more")
        found = await encode(Recording(wav, rate=self.rate))
        yield TokenChunk(found[done - begin :].tolist(), "stop")

    def _settled(self, begin: int, done: int, known: int) -> int:
        """Return the end of the tokens that a window can give now, of `known` ones, `done` if there are too few."""
        if known > MAX_STREAM_TOKENS:
            raise ValueError(f"source_wav is longer than {MAX_SOURCE_SECONDS:g} s: convert it in parts")
        if known - begin > WINDOW_TOKENS:
            return begin + WINDOW_TOKENS - (LIVE if self.live else RECORDED).ahead
        return known - LIVE.ahead if self.live and known - done >= LIVE_STEP + LIVE.ahead else done
