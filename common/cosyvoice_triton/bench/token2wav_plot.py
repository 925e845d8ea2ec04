"""Plot of the benchmark: latencies under load, and throughput by batch size."""

from pathlib import Path
from typing import Any

from cosyvoice_triton.bench.token2wav_load import LoadResult
from cosyvoice_triton.load.plot import figure, save


def plot(result: dict[str, Any], loads: list[LoadResult], path: Path) -> None:
    picture, [[left, right]] = figure(1, 2, 12, 4.5)
    picture.suptitle(f"token2wav, {result['stack']} stack, {result['weights']}, {result['device']}")
    _first_chunks(left, result, loads)
    if "batches" in result:
        for hop in result["hops"]:
            rows = [row for row in result["batches"] if row["hop"] == hop]
            right.plot(
                [row["streams"] for row in rows],
                [row["audio_seconds_per_second"] for row in rows],
                marker="o",
                label=f"{hop} tokens",
            )
        right.set(xlabel="streams in a batch", ylabel="audio seconds per second", title="throughput", xscale="log")
        right.legend(title="chunk")
    else:
        rows = result["loads"]
        right.plot([row["listeners"] for row in rows], [100 * row["share_without_gap"] for row in rows], marker="o")
        right.set(title="streams without a gap", xlabel="listeners", ylabel="%", ylim=(0, 102))
    save(picture, path)


def _first_chunks(axes: Any, result: dict[str, Any], loads: list[LoadResult]) -> None:
    axes.set(title="first chunk", ylabel="ms")
    if not loads:
        axes.bar(["plain form", "engine"], [result["plain_first_chunk_ms"], result["first_chunk_ms"]])
        return
    axes.boxplot(
        [[1e3 * listener.latencies[0] for listener in load.listeners if listener.latencies] for load in loads],
        tick_labels=[load.label for load in loads],
        whis=(5, 95),
    )
    axes.axhline(result["plain_first_chunk_ms"], linestyle="--", label="plain form, one stream")
    axes.set(xlabel="utterances started per second", ylim=(0, None))
    axes.legend()
