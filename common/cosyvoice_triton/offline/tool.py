"""What the offline tools share: how their process is set up, and the samples that failed."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.load.samples import Sample

FAILURES_SHOWN = 20


class Failure(NamedTuple):
    """Why a sample has no audio."""

    id: str
    stage: str
    error: str

    @classmethod
    def of(cls, sample: Sample, stage: str, error: Exception) -> "Failure":
        reason = " ".join(str(error).split())
        if not isinstance(error, (ValueError, UnavailableError, OSError)):
            reason = f"{type(error).__name__}: {reason}"  # out of memory, or a bug
        return cls(sample.id, stage, reason)


def set_up() -> None:
    """Show warnings as plain lines; let torch use one thread, unless OMP_NUM_THREADS is set."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if "OMP_NUM_THREADS" not in os.environ:
        # The LLM has threads of its own: torch's would wait for cores that those keep busy, ten times as long.
        torch.set_num_threads(1)


def show_failures(failures: Sequence[Failure], file: str) -> None:
    """Print the first ones to standard error; all are in `file`."""
    for failure in failures[:FAILURES_SHOWN]:
        print(f"failed: {failure.id} ({failure.stage}): {failure.error}", file=sys.stderr)
    if hidden := failures[FAILURES_SHOWN:]:
        print(f"failed: {len(hidden)} more, all in {file}", file=sys.stderr)


def show_resynthesis(samples: Sequence[Sample]) -> int:
    """Print and return the number of samples without tokens."""
    count = sum(sample.target_audio_cosy2_tokens is None for sample in samples)
    if count:
        print(f"{count} of {len(samples)} samples have no tokens and resynthesize their recordings")
    return count
