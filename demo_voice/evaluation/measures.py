"""Measures of takes: word errors, lengths, joints, times, speaker similarity."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, reduce
from multiprocessing import get_context
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from cosyvoice_triton.constants import OVERLAP_SAMPLES, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice import audio
from cosyvoice_triton.voice.encoders import SpeakerEncoder

from demo_voice.evaluation.recognition import Recognizer, WordErrors, word_errors
from demo_voice.evaluation.takes import Series, Take

ELSEWHERE = 99.9  # percentile of the sample-to-sample steps outside of joints, which a joint is compared with
NEARBY = SAMPLE_RATE // 200  # 5 ms: duration of a glottal pulse
CLICK = 1.5  # times the largest step near the joint


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
    if joints := [joint for take in series.takes for joint in joint_steps(take)]:
        found["joints"] = {
            "count": len(joints),
            "above": sum(joint.usual > 1 for joint in joints),
            "worst": max(joint.usual for joint in joints),
            "clicks": sum(joint.clicks for joint in joints),
        }
    timed = [take for take in series.takes if take.total is not None]
    if timed:
        found["rtf"] = sum(take.total or 0.0 for take in timed) / sum(take.seconds for take in timed)
        first = [take.first_chunk or 0.0 for take in timed]
        found["first_chunk"] = {"median": float(np.median(first)), "p95": float(np.percentile(first, 95))}
    return found


class Joint(NamedTuple):
    """One end of a cross-fade: the step between two samples, relative to other steps of the same take.

    usual: relative to the 99.9th percentile of the steps elsewhere. nearby: relative to the largest step within 5 ms.
    """

    usual: float
    nearby: float

    @property
    def clicks(self) -> bool:
        """Whether it is audible as a click. A large step among others as large is a glottal pulse."""
        return self.usual > 1 and self.nearby > CLICK


def joint_steps(take: Take) -> list[Joint]:
    """Both ends of the cross-fades of a take, in order. A cross-fade begins where a chunk does."""
    steps = np.abs(np.diff(take.waveform))  # (N - 1,): step i leads to sample i + 1
    ends = [at for joint in take.joints for at in (joint, joint + OVERLAP_SAMPLES) if at < len(steps)]
    if not ends:
        return []
    usual = np.percentile(np.delete(steps, np.array(ends) - 1), ELSEWHERE)
    found = []
    for end in ends:
        at = end - 1
        nearby = np.concatenate([steps[max(0, at - NEARBY) : at], steps[at + 1 : at + 1 + NEARBY]]).max()
        found.append(Joint(float(steps[at] / usual), float(steps[at] / max(nearby, 1e-9))))
    return found


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
