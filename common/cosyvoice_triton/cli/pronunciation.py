"""The option of a dictionary of words and readings."""

import argparse
from pathlib import Path

from cosyvoice_triton.text.pronunciation import read_pronunciations


def words(path: str) -> dict[str, str]:
    """Read a file with a dictionary of words and readings."""
    try:
        return read_pronunciations(Path(path))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
