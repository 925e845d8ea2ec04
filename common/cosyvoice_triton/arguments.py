"""What the commands share: their parser, types of options, how they end, and this program's own name.

argparse reports what a type raises together with the option's name.
"""

import argparse
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

P = ParamSpec("P")
# What a command reports without a traceback. Most errors of ours are RuntimeErrors.
ERRORS = (ValueError, RuntimeError, OSError, ImportError, subprocess.SubprocessError)


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring and takes whole names of options only."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def reporting_errors(interrupted: str = "interrupted") -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate a command, which returns its exit code: with 1 and a line on standard error if it cannot do its work,
    with 130 and `interrupted` there if it is interrupted."""

    def decorated(command: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(command)
        def main(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return command(*args, **kwargs)
            except ERRORS as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print(f"error: {interrupted}", file=sys.stderr)
                return 130

        return main

    return decorated


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


def positive_number(text: str) -> float:
    """Parse a number of a command line that is above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    if not 0 <= (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..1")
    return number


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
