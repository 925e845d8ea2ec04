"""How the offline tools end: an exit code, one line for what stopped them, and the names of what failed."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.errors import UnavailableError
from tools.load.samples import Sample

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
            reason = f"{type(error).__name__}: {reason}"  # memory that ran out, or a bug
        return cls(sample.id, stage, reason)


def exit_code(tool: str, run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """That of `run`, 1 with one line on standard error where it cannot begin, 130 where it is interrupted."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return run()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{tool}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{tool}: {interrupted}", file=sys.stderr)
        return 130


def show_failures(failures: Sequence[Failure], file: str) -> None:
    """The first ones, on standard error; all are in `file`."""
    for failure in failures[:FAILURES_SHOWN]:
        print(f"failed: {failure.id} ({failure.stage}): {failure.error}", file=sys.stderr)
    if hidden := failures[FAILURES_SHOWN:]:
        print(f"failed: {len(hidden)} more, all in {file}", file=sys.stderr)


def show_resynthesis(samples: Sequence[Sample]) -> int:
    """Say how many samples have no tokens of their own, and return that."""
    count = sum(sample.target_audio_cosy2_tokens is None for sample in samples)
    if count:
        print(f"{count} of {len(samples)} samples have no tokens and say their recordings again")
    return count
