"""Counters of the servers during a run.

Triton's statistics have the queue and compute times of each model. Models that continue after `execute` has returned
(the orchestrators, `tensorrt_llm`, `token2wav*`) have compute times near zero there; see the stages of a request
(`RequestOutcome.stages`) instead. token2wav's queue and batches are counted on the metrics page of our models.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from http.client import HTTPException
from typing import Any

import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from cosyvoice_triton.addresses import open_page
from cosyvoice_triton.monitoring.metrics import sum_of

STATISTICS_SECONDS = 10.0
TOKEN2WAV_COUNTERS = ("chunks", "batches", "waited_seconds")  # tts_token2wav_..._total
REFUSED = re.compile(r'^tts_token2wav_refused_total\{(?:[^}]*,)?reason="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True)
class ModelTimes:
    """Sums over the requests of one model, times in seconds. executions: batches; answers from the cache need none."""

    server: str
    name: str
    requests: int = 0
    failures: int = 0
    executions: int = 0
    cache_hits: int = 0
    queue: float = 0.0
    compute_input: float = 0.0
    compute_infer: float = 0.0
    compute_output: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        return self.server, self.name

    def since(self, before: "ModelTimes") -> "ModelTimes":
        sums = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)[2:]}
        return ModelTimes(self.server, self.name, **sums)


async def model_times(client: triton.InferenceServerClient, server: str) -> list[ModelTimes]:
    """Return the counters of every model; empty if the server does not report any."""
    try:
        answer = await client.get_inference_statistics("", client_timeout=STATISTICS_SECONDS)
    except InferenceServerException:
        return []
    return [_of(server, model) for model in answer.model_stats]


def _of(server: str, model: Any) -> ModelTimes:
    stats = model.inference_stats
    return ModelTimes(
        server,
        model.name,
        requests=stats.success.count,
        failures=stats.fail.count,
        executions=model.execution_count,
        cache_hits=stats.cache_hit.count,
        queue=stats.queue.ns / 1e9,
        compute_input=stats.compute_input.ns / 1e9,
        compute_infer=stats.compute_infer.ns / 1e9,
        compute_output=stats.compute_output.ns / 1e9,
    )


def between(before: Iterable[ModelTimes], after: Iterable[ModelTimes]) -> list[ModelTimes]:
    """Return the differences of two readings, for models that had requests."""
    known = {model.key: model for model in before}
    added = [model.since(known.get(model.key, ModelTimes(*model.key))) for model in after]
    return [model for model in added if model.requests or model.failures]


async def token2wav_counters(pages: Sequence[str]) -> dict[str, float]:
    """Return sums of token2wav's counters over the metrics pages host:port, and of its refusals by their limit.

    Empty if a page cannot be read.
    """
    if not (texts := await _texts(pages)):
        return {}
    counters = {name: sum(sum_of(text, f"tts_token2wav_{name}_total") for text in texts) for name in TOKEN2WAV_COUNTERS}
    for reason, count in (line for text in texts for line in REFUSED.findall(text)):
        counters[f"refused {reason}"] = counters.get(f"refused {reason}", 0.0) + float(count)
    return counters


async def _texts(pages: Sequence[str]) -> list[str]:
    """Return the content of metrics pages; nothing if one cannot be read."""
    try:
        return [await asyncio.to_thread(_page, page) for page in pages]
    except (OSError, ValueError, HTTPException):  # urllib's own errors are OSErrors; the others: not HTTP, not UTF-8
        return []


def _page(address: str) -> str:
    with open_page(f"http://{address}/metrics", STATISTICS_SECONDS) as answer:
        return str(answer.read().decode())


def token2wav_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any] | None:
    """Return a chunk's mean wait for its batch, ms, the mean batch size, and how many listeners each limit refused.

    None without counters or chunks.
    """
    added = {name: count - before.get(name, 0.0) for name, count in after.items()}
    if not before or added.get("chunks", 0) <= 0 or added["batches"] <= 0:
        return None
    return {
        "mean_wait_ms": 1000 * added["waited_seconds"] / added["chunks"],
        "mean_batch": added["chunks"] / added["batches"],
        "refused": {
            name.removeprefix("refused "): int(count)
            for name, count in sorted(added.items())
            if name.startswith("refused ") and count > 0
        },
    }
