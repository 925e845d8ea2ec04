"""Measures of takes: word errors, lengths, times, speaker similarity."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, reduce
from multiprocessing import get_context
from operator import add
from typing import Any

import numpy as np
import torch
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.voice import audio
from cosyvoice_triton.voice.encoders import SpeakerEncoder

from demo_voice.evaluation.recognition import Recognizer, WordErrors, word_errors
from demo_voice.evaluation.takes import Series, Take


@lru_cache(maxsize=1)
def _recognizer() -> Recognizer:
    torch.set_num_threads(1)
    return Recognizer()


def _transcribe(take: Take) -> str:
    return _recognizer().transcribe(take.waveform, take.rate)


def recognise(series: Sequence[Series]) -> list[list[str]]:
    """The words recognised in every take, on all cores."""
    takes = [take for each in series for take in each.takes]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        recognised = iter(list(pool.map(_transcribe, takes, chunksize=8)))
    return [[next(recognised) for _ in each.takes] for each in series]


def figures(series: Series, recognised: Sequence[str], teacher: Series | None) -> dict[str, Any]:
    """Figures of one series; unknown ones are omitted. Times in seconds."""
    errors = [word_errors(take.text, words) for take, words in zip(series.takes, recognised, strict=True)]
    total = reduce(add, errors, WordErrors())
    found: dict[str, Any] = {
        "system": series.system,
        "stack": series.stack,
        "voice": series.voice,
        "wer": total.rate,
        "words": total.words,
        "heard": [
            {"text": take.text, "heard": words, "errors": each.errors, "seconds": round(take.seconds, 3)}
            for take, words, each in zip(series.takes, recognised, errors, strict=True)
        ],
    }
    if teacher is not None and teacher is not series:
        lengths = [take.seconds / other.seconds for take, other in zip(series.takes, teacher.takes, strict=True)]
        found["lengths"] = {"least": min(lengths), "median": float(np.median(lengths)), "most": max(lengths)}
    timed = [take for take in series.takes if take.total is not None]
    if timed:
        found["rtf"] = sum(take.total or 0.0 for take in timed) / sum(take.seconds for take in timed)
        first = [take.first_chunk or 0.0 for take in timed]
        found["first_chunk"] = {"median": float(np.median(first)), "p95": float(np.percentile(first, 95))}
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return figures of series as a Markdown table."""
    lines = ["| audio | stack | voice | WER | length / teacher's | RTF | first chunk |", "|---" * 7 + "|"]
    for row in rows:
        lengths, first = row.get("lengths"), row.get("first_chunk")
        cells = [
            f"{row['wer']:.1%}",
            f"{lengths['median']:.2f} ({lengths['least']:.2f}–{lengths['most']:.2f})" if lengths else "",
            f"{row['rtf']:.2f}" if "rtf" in row else "",
            f"{1000 * first['median']:.0f} ms, p95 {1000 * first['p95']:.0f} ms" if first else "",
        ]
        lines.append(f"| {' | '.join((row['system'], row['stack'], row['voice'], *cells))} |")
    return "\n".join(lines) + "\n"


def nearest(encoder: SpeakerEncoder, takes: Sequence[Take], voices: Mapping[str, Sequence[Take]]) -> list[str]:
    """The most similar voice of each take, by cosine between its x-vector and the mean of the voice's."""
    names = list(voices)
    centres = np.stack([_unit(_vectors(encoder, voices[name]).mean(axis=0)) for name in names])  # (V, 192)
    nearness = _vectors(encoder, takes) @ centres.T  # (n, V)
    return [names[index] for index in nearness.argmax(axis=1)]


def _vectors(encoder: SpeakerEncoder, takes: Sequence[Take]) -> np.ndarray:
    """x-vectors (n, 192) of unit length."""
    waves = [audio.resample(torch.from_numpy(take.waveform), take.rate, PROMPT_SAMPLE_RATE).numpy() for take in takes]
    return _unit(np.stack(encoder(waves)))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
