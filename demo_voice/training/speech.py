"""Stages `speech` and `more_speech`: the teacher speaks the corpus.

`speech` writes the files of `dataset.py`, on which all networks are trained. `more_speech` continues with other
sentences while the first networks are trained; only the LLM uses them, because it needs more text than the others. It
writes shards to `more/`: `N.audio`, raw int16 samples at 24 kHz, and `N.npy` (U, 3), like utterances.npy.
"""

import logging
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from demo_voice.training.dataset import TOKEN_PHONES, TOKEN_SAMPLES
from demo_voice.training.kokoro import DEMO_VOICES, FRAME_SAMPLES, SAMPLE_RATE, VOICES, Spoken, Teacher, Utterance
from demo_voice.training.phonemes import letter_labels, sampled

logger = logging.getLogger(__name__)

# Processes on one GPU: one computes while another prepares texts or writes waves.
PROCESSES, MORE_PROCESSES = 4, 3
LINES_AT_ONCE = 2400
DEMO_SHARE = 0.75  # of the lines; the other voices share the rest
MORE_DEMO_SHARE = 1.0
SLOWEST, FASTEST = 0.9, 1.1

WINDOW = 120  # samples of the windows whose levels are measured
AUDIBLE = 10 ** (-42 / 20)  # of the loudest window
BEFORE, AFTER = round(0.020 * SAMPLE_RATE), round(0.080 * SAMPLE_RATE)  # kept silence; then to the end of a token
FADE = round(0.010 * SAMPLE_RATE)
LEVEL = 0.09  # root mean square of the audible part
LOUDEST = 0.95
REPORT_SECONDS = 10.0

Clip = tuple[np.ndarray, np.ndarray]


def synthesize(work: Path, seconds: float, teacher: Path, device: str) -> None:
    """Stage `speech`: write the files of `dataset.py`."""
    shards = _scratch(work / "speech")
    _run(work, seconds, teacher, device, shards, DEMO_SHARE, PROCESSES)
    _join(shards, work)
    shutil.rmtree(shards)
    _log_hours("speech", np.load(work / "utterances.npy"))


def synthesize_more(work: Path, seconds: float, teacher: Path, device: str) -> None:
    """Stage `more_speech`."""
    shards = _scratch(work / "more")
    _run(
        work, seconds, teacher, device, shards, MORE_DEMO_SHARE, MORE_PROCESSES, np.load(work / "utterances.npy")[:, 0]
    )
    _log_hours("more_speech", np.concatenate([np.load(path) for path in sorted(shards.glob("*.npy"))]))


def _log_hours(stage: str, utterances: np.ndarray) -> None:
    hours = utterances[:, 2].sum() * TOKEN_SAMPLES / SAMPLE_RATE / 3600
    counts = np.bincount(utterances[:, 1], minlength=len(VOICES))
    logger.info("%s: %d utterances, %.1f h, by voice %s", stage, len(utterances), hours, counts.tolist())


def _scratch(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def planned(lines: int, demo_share: float) -> tuple[np.ndarray, np.ndarray]:
    """The voice (lines,) and the speed (lines,) of each line of the corpus: random, and equal at every call."""
    rng = np.random.default_rng(24)
    demo = rng.integers(len(DEMO_VOICES), size=lines)
    others = rng.integers(len(DEMO_VOICES), len(VOICES), size=lines)
    return np.where(rng.random(lines) < demo_share, demo, others), rng.uniform(SLOWEST, FASTEST, lines)


def _run(
    work: Path,
    seconds: float,
    teacher: Path,
    device: str,
    shards: Path,
    demo_share: float,
    processes: int,
    done: np.ndarray | None = None,
) -> None:
    """Synthesise the lines that are not `done`, in order, for `seconds`. A process that fails is logged; RuntimeError
    if all do."""
    deadline = time.monotonic() + seconds
    count = (work / "phonemes.txt").read_bytes().count(b"\n")
    lines = np.setdiff1d(np.arange(count), [] if done is None else done)
    processes = processes if torch.device(device).type == "cuda" else 1
    chunks = [lines[begin : begin + LINES_AT_ONCE] for begin in range(0, len(lines), LINES_AT_ONCE)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        workers = [
            pool.submit(
                _worker, work, teacher, device, shards / str(index), chunks[index::processes], demo_share, deadline
            )
            for index in range(processes)
        ]
    errors = [error for worker in workers if (error := worker.exception())]
    for error in errors:
        logger.error("a process failed: %r", error)
    if len(errors) == processes:
        raise RuntimeError("no process could synthesise speech") from errors[0]


def _worker(
    work: Path, teacher: Path, device: str, shard: Path, chunks: list[np.ndarray], demo_share: float, deadline: float
) -> None:
    """One process: load the teacher, and synthesise chunks of lines into files next to `shard`."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {shard.name}: %(message)s", datefmt="%H:%M:%S")
    begun = time.monotonic()
    if torch.device(device).type == "cuda":
        torch.set_num_threads(1)  # the cores are for the other processes
    voice = Teacher(teacher, device)
    warm_up = [Utterance(voice.ids("həlˈO."), index, 1.0) for index in range(4)]
    logger.info("teacher: %d warm-up utterances", sum(1 for _ in voice.speak(warm_up)))
    logger.info("teacher: ready after %.1f s", time.monotonic() - begun)
    write_shard(shard, work, voice, chunks, demo_share, lambda: time.monotonic() > deadline)


def write_shard(
    shard: Path, work: Path, teacher: Teacher, chunks: list[np.ndarray], demo_share: float, is_over: Callable[[], bool]
) -> None:
    """Synthesise chunks of lines until `is_over`: `shard` with the suffixes .audio, .phones and .npy."""
    utterances = []
    with shard.with_suffix(".audio").open("wb") as audio, shard.with_suffix(".phones").open("wb") as labels:
        for line, voice, (samples, phones) in spoken_lines(work, teacher, chunks, demo_share):
            audio.write(samples.tobytes())
            labels.write(phones.tobytes())
            utterances.append((line, voice, len(samples) // TOKEN_SAMPLES))
            if is_over():
                break
    np.save(shard.with_suffix(".npy"), np.array(utterances, np.int64).reshape(-1, 3))


def spoken_lines(
    work: Path, teacher: Teacher, chunks: list[np.ndarray], demo_share: float
) -> Iterator[tuple[int, int, Clip]]:
    """Line, voice and clip of all lines of each chunk, in a random order within a chunk."""
    texts = (work / "phonemes.txt").read_text(encoding="utf-8").splitlines()
    voices, speeds = planned(len(texts), demo_share)
    begun = reported = time.monotonic()
    count, seconds = 0, 0.0
    for chunk in chunks:
        lines = chunk.tolist()
        utterances = [Utterance(teacher.ids(texts[line]), int(voices[line]), float(speeds[line])) for line in lines]
        for spoken in teacher.speak(utterances, seed=lines[0]):
            line = lines[spoken.index]
            clip = clipped(spoken, teacher.letters(utterances[spoken.index].ids))
            if clip:
                yield line, int(voices[line]), clip
                count, seconds = count + 1, seconds + len(clip[0]) / SAMPLE_RATE
            if time.monotonic() > reported + REPORT_SECONDS:
                reported = time.monotonic()
                passed = reported - begun
                logger.info("%d utterances, %.0f/s, %.0f x real time", count, count / passed, seconds / passed)


def clipped(spoken: Spoken, letters: str) -> Clip | None:
    """A wave (T * TOKEN_SAMPLES,) int16 without the silence around speech, at LEVEL, and phones (T * 4,) uint8.

    None if there is nothing to hear, or what is heard is no number.
    """
    wave = spoken.wave
    windows = wave[: len(wave) // WINDOW * WINDOW].reshape(-1, WINDOW)
    levels = np.sqrt(np.square(windows).mean(1))
    loudest = levels.max(initial=0.0)
    if not 1e-3 < loudest < np.inf:
        return None
    audible = np.flatnonzero(levels > AUDIBLE * loudest)
    begin = max(0, int(audible[0]) * WINDOW - BEFORE)
    end = min(len(wave), (int(audible[-1]) + 1) * WINDOW + AFTER)
    tokens = -(-(end - begin) // TOKEN_SAMPLES)
    part = wave[begin : begin + tokens * TOKEN_SAMPLES]
    level = float(np.sqrt(np.square(levels[audible]).mean()))
    gain = min(LEVEL / level, LOUDEST / float(np.abs(part).max()))
    part = part * np.float32(gain)
    ramp = np.linspace(0, 1, min(FADE, len(part)), dtype=np.float32)
    part[: len(ramp)] *= ramp
    part[len(part) - len(ramp) :] *= ramp[::-1]
    samples = np.zeros(tokens * TOKEN_SAMPLES, np.int16)
    samples[: len(part)] = np.round(part * 32767)
    seconds = spoken.frames * (FRAME_SAMPLES / SAMPLE_RATE)
    labels = sampled(letter_labels(letters), seconds, begin / SAMPLE_RATE, tokens * TOKEN_PHONES)
    return samples, labels


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
