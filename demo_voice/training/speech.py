"""Stages `speech` and `more_speech`: flite synthesises the corpus, on all cores.

`speech` writes the files of `dataset.py`, on which all networks are trained. `more_speech` continues with the following
sentences while the first networks are trained; only the LLM uses them, because it needs more text than the others. It
writes shards to `more/`: `N.audio`, raw int16 samples, and `N.npy` (U, 3), like utterances.npy.
"""

import logging
import multiprocessing
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from demo_voice.training.dataset import TOKEN_PHONES, TOKEN_SAMPLES
from demo_voice.training.flite import Flite

logger = logging.getLogger(__name__)

# Voices of consecutive sentences, as indices in flite.VOICES, repeated cyclically.
VOICE_CYCLE = (0, 1, 0, 1, 2, 0, 1, 0, 1, 3)
MORE_VOICE_CYCLE = (0, 1)


def synthesize(work: Path, seconds: float, flite: Path) -> None:
    """Stage `speech`: write the files of `dataset.py`."""
    shards = _scratch(work / "speech")
    _run(work, seconds, flite, shards, 0, os.cpu_count() or 1, VOICE_CYCLE)
    _join(shards, work)
    shutil.rmtree(shards)
    utterances = np.load(work / "utterances.npy")
    hours = utterances[:, 2].sum() / 25 / 3600
    logger.info("speech: %d utterances, %.1f h", len(utterances), hours)


def synthesize_more(work: Path, seconds: float, flite: Path) -> None:
    """Stage `more_speech`. It leaves some cores to the processes that feed the GPU."""
    shards = _scratch(work / "more")
    first = int(np.load(work / "utterances.npy")[:, 0].max()) + 1
    processes = max(1, (os.cpu_count() or 1) - 5)
    _run(work, seconds, flite, shards, first, processes, MORE_VOICE_CYCLE)
    hours = sum(np.load(path)[:, 2].sum() for path in shards.glob("*.npy")) / 25 / 3600
    logger.info("more speech: %.1f h", hours)


def _scratch(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _run(
    work: Path, seconds: float, flite: Path, shards: Path, first: int, processes: int, voice_cycle: tuple[int, ...]
) -> None:
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        workers = []
        for index in range(processes):
            lines = range(first + index, 10**9, processes)
            shard = shards / str(index)
            workers.append(pool.submit(_synthesize_lines, work, flite, shard, lines, voice_cycle, seconds))
    for worker in workers:
        worker.result()


def _synthesize_lines(
    work: Path, flite: Path, shard: Path, lines: range, voice_cycle: tuple[int, ...], seconds: float
) -> None:
    """One process: synthesise the sentences `lines` until `seconds` have passed, into files next to `shard`."""
    os.nice(5)
    sentences = (work / "sentences.txt").read_text(encoding="utf-8").splitlines()
    voices = Flite(flite)
    utterances = []
    deadline = time.monotonic() + seconds
    with shard.with_suffix(".audio").open("wb") as audio, shard.with_suffix(".phones").open("wb") as labels:
        for line in range(lines.start, len(sentences), lines.step):
            if time.monotonic() > deadline:
                break
            voice = voice_cycle[line % len(voice_cycle)]
            samples, phones = voices.synthesize(sentences[line], voice)
            audio.write(samples.tobytes())
            labels.write(phones.tobytes())
            utterances.append((line, voice, len(samples) // TOKEN_SAMPLES))
    np.save(shard.with_suffix(".npy"), np.array(utterances, np.int64).reshape(-1, 3))


def _join(shards: Path, work: Path) -> None:
    """Join the shards into one stream, grouped by voice, in the order of the sentences."""
    parts = []
    for path in sorted(shards.glob("*.npy")):
        utterances = np.load(path)
        if not len(utterances):
            continue
        starts = np.cumsum(utterances[:, 2]) - utterances[:, 2]
        audio = np.memmap(path.with_suffix(".audio"), np.int16, "r").reshape(-1, TOKEN_SAMPLES)
        phones = np.memmap(path.with_suffix(".phones"), np.uint8, "r").reshape(-1, TOKEN_PHONES)
        for (line, voice, length), start in zip(utterances.tolist(), starts.tolist(), strict=True):
            parts.append((voice, line, length, audio[start : start + length], phones[start : start + length]))
    parts.sort(key=lambda part: part[:2])
    total = sum(part[2] for part in parts)
    streams = (("audio", np.int16, TOKEN_SAMPLES, 3), ("phones", np.uint8, TOKEN_PHONES, 4))
    for name, dtype, width, column in streams:
        stream = np.lib.format.open_memmap(work / f"{name}.npy", "w+", dtype, (total * width,))
        rows, begin = stream.reshape(total, width), 0
        for part in parts:
            rows[begin : begin + part[2]] = part[column]
            begin += part[2]
        stream.flush()
    np.save(work / "utterances.npy", np.array([(line, voice, length) for voice, line, length, *_ in parts], np.int64))
