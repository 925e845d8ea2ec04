"""Names of the token2wav models of one server: replicas, one for each GPU.

The first has the name in its template, the others that name and their number: `token2wav_dit`, `token2wav_dit_1`.
"""

import re

_NUMBERED = re.compile(r"(\w+)_([1-9]\d*)")


def replicas(model: str, count: int) -> tuple[str, ...]:
    """Return the names of `count` replicas of a model."""
    return (model, *(f"{model}_{number}" for number in range(1, count)))


def first_replica(model: str) -> str:
    """Return the name without a number."""
    return match[1] if (match := _NUMBERED.fullmatch(model)) else model


def replica_number(model: str) -> int:
    """Return the number in the name, 0 for the first replica."""
    return int(match[2]) if (match := _NUMBERED.fullmatch(model)) else 0
