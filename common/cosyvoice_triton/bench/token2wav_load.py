"""token2wav's service under load: a door of `load` that is fed with tokens at twice real time, and its figures."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.client import failures
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, TOKEN_RATE
from cosyvoice_triton.errors import OverloadedError, unavailable_message
from cosyvoice_triton.load.doors import Door
from cosyvoice_triton.load.jobs import LoadJob
from cosyvoice_triton.load.plan import Load
from cosyvoice_triton.load.runner import measured
from cosyvoice_triton.speaker.engines import send_to
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.serving.service import Token2WavService
from cosyvoice_triton.voice.prompt import Prompt

FEED_RATE = 2 * TOKEN_RATE  # tokens per second
NOTHING = np.zeros(0, np.int64)


class Piece(NamedTuple):
    """The tokens of a chunk, before its stream is known."""

    tokens: np.ndarray
    final: bool


class Token2WavDoor(Door):
    """The service itself, without Triton. The `seed` of a request chooses its pieces and its voice.

    hops: tokens of each chunk but the last. tokens: of an utterance. first, later: seconds from when a chunk's tokens
    and the previous chunk have arrived until its audio.
    """

    def __init__(
        self,
        service: Token2WavService,
        pieces: Callable[[int], Sequence[Piece]],
        voice: Callable[[int], Prompt],
        hops: Sequence[int],
        tokens: int,
    ) -> None:
        self._send, self._pieces, self._voice = send_to(service), pieces, voice
        needs = [end + LOOKAHEAD_TOKENS for end in itertools.accumulate(hops)]
        self._needs = [*(need for need in needs if need < tokens), tokens]
        self.first: list[float] = []
        self.later: list[float] = []

    async def stream(self, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        begun, seed = time.perf_counter(), int(request.parameters["seed"])
        ask, pieces = partial(Token2WavRequest, f"sequence {seed + 1}"), self._pieces(seed)
        await self._answer(seed, ask(start=True, end=False, tokens=NOTHING, prompt=self._voice(seed)))
        needs = [*self._needs[: len(pieces) - 1], self._needs[-1]]
        for piece, need in zip(pieces, needs, strict=True):
            await asyncio.sleep(begun + need / FEED_RATE - time.perf_counter())
            asked = time.perf_counter()
            audio = await self._answer(seed, ask(start=False, end=piece.final, tokens=piece.tokens, final=piece.final))
            (self.first if piece is pieces[0] else self.later).append(time.perf_counter() - asked)
            yield AudioPart(audio)

    async def _answer(self, seed: int, request: Token2WavRequest) -> np.ndarray:
        """Return the audio of a request. ClientError for a refusal; other errors are the service's own."""
        try:
            return await self._send(seed, request)
        except OverloadedError as error:
            raise failures.refused(unavailable_message(error)) from None


def run_load(
    engine: Token2Wav,
    pieces: Callable[[int], Sequence[Piece]],
    voice: Callable[[int], Prompt],
    *,
    hops: Sequence[int],
    tokens: int,
    utterances: int,
    window: float,
) -> dict[str, float]:
    """Return the figures of so many utterances, which start at random times within about `window` seconds.

    `errors`, the times and `share_without_gap` are of the listeners who were admitted.
    """
    for seed in range(utterances):  # fill the prompt caches before timing
        engine.close(engine.open(voice(seed)))
    service = Token2WavService(engine, idle_seconds=600)
    door = Token2WavDoor(service, pieces, voice, hops, tokens)
    jobs = [LoadJob(str(seed), Utterance("", parameters={"seed": seed})) for seed in range(utterances)]
    load = Load(["token2wav"], "", "streaming", jobs, rate=utterances / window)
    run = measured(load, f"{utterances} utterances", 5, {"token2wav": door})
    stats = service.stats()
    service.close()
    refusals = np.percentile([each.total for each in run.refused] or [0.0], (50, 95, 100))
    players = [each.played() for each in run.good]
    figures = {
        "refusal_p50_ms": refusals[0],
        "refusal_p95_ms": refusals[1],
        "refusal_max_ms": refusals[2],
        "first_chunk_p50_ms": np.percentile(door.first, 50),
        "first_chunk_p95_ms": np.percentile(door.first, 95),
        "later_chunk_p50_ms": np.percentile(door.later, 50),
        "later_chunk_p95_ms": np.percentile(door.later, 95),
        "worst_gap_ms": max(player.worst_gap for player in players),
        "least_slack_p5_ms": np.percentile([player.least_slack for player in players], 5),
        "mean_wait_ms": stats.waited_seconds / max(stats.chunks, 1),
    }
    return {
        "refused": len(run.refused),
        "utterances": utterances,
        "window_seconds": window,
        "errors": len(run.failed),
        "share_without_gap": sum(player.worst_gap <= 0 for player in players) / (len(players) + len(run.failed)),
        "mean_batch": stats.chunks / max(stats.batches, 1),
        **{name: 1e3 * float(seconds) for name, seconds in figures.items()},
    }


def line(s: dict[str, float]) -> str:
    """Return the figures of `run_load` as a line for people."""
    return (
        f"{s['utterances']:3.0f} utterances within {s['window_seconds']:.3g} s: first chunk p50 "
        f"{s['first_chunk_p50_ms']:.1f}, p95 {s['first_chunk_p95_ms']:.1f} ms; "
        f"later p95 {s['later_chunk_p95_ms']:.1f} ms; without a gap {100 * s['share_without_gap']:.1f} %, "
        f"worst {s['worst_gap_ms']:.0f} ms; least slack p5 {s['least_slack_p5_ms']:.0f} ms; "
        f"errors {s['errors']:.0f}; refused {s['refused']:.0f} after p50 {s['refusal_p50_ms']:.2f}, "
        f"p95 {s['refusal_p95_ms']:.2f}, max {s['refusal_max_ms']:.2f} ms; mean batch {s['mean_batch']:.1f}"
    )
