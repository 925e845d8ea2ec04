"""Types for argparse, which reports what they raise together with the option's name; this program's own name."""

import argparse
import os
import shutil
import sys
from pathlib import Path

from cosyvoice_triton.text.pronunciation import read_pronunciations


def positive_int(text: str) -> int:
    if (number := natural_int(text)) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def natural_int(text: str) -> int:
    """Parse an integer that is zero or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"'{text}' is negative")
    return number


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    if not 0 <= (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..1")
    return number


def words(path: str) -> dict[str, str]:
    """Read a file with a dictionary of words and readings."""
    try:
        return read_pronunciations(Path(path))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def boolean(text: str) -> bool:
    """Parse the value of those flags of upstream that take one."""
    flags = {"true": True, "1": True, "false": False, "0": False}
    if (flag := flags.get(text.lower())) is None:
        raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")
    return flag


def program() -> str:
    """Return what the caller's shell runs as this command: its name, or the path of one that is not on the PATH."""
    installed, found = Path(sys.executable).with_name("cosyvoice-triton"), shutil.which("cosyvoice-triton")
    if not installed.exists() or (found and installed.samefile(found)):
        return installed.name
    return os.path.relpath(installed)
