"""Memory that this process has freed but still holds."""

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed() -> None:
    """Give freed memory that the C library keeps back to the system; takes 20 to 50 ms for 400 MiB on a free core.

    glibc keeps what is freed below the last block in use. Tensors have hundreds of sizes and leave its heap in pieces:
    token2wav then holds two to three times the memory that it uses, and more with every new size
    (docs/results/operations.md). Does nothing with a C library that cannot.
    """
    if _trim is not None:
        _trim(0)
