"""How a load program ends: errors as one line on standard error, and the exit code."""

import logging
import sys
from collections.abc import Callable

from cosyvoice_triton.client.requests import ClientError
from cosyvoice_triton.load.samples import SampleError


def exit_code(run: Callable[[], int], *, output_option: str, interrupted: str) -> int:
    """Returns what `run` returns; 1 if it cannot start or write its report, 130 if it is interrupted."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return run()
    except (ClientError, SampleError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: cannot write the report: {error}; choose another path with {output_option}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"error: {interrupted}", file=sys.stderr)
        return 130
    return 1
