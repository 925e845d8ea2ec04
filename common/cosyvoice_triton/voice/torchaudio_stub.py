"""An empty torchaudio, for packages that import it without using it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

NAMES = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")


@contextmanager
def torchaudio_or_stub() -> Iterator[None]:
    """Import such a package inside this block; it works with or without torchaudio.

    torchaudio's wheel does not load with a CPU build of torch, so machines without a GPU have none. Empty modules
    replace it during the import only, because other packages look for torchaudio to decide what they offer.
    """
    try:
        import torchaudio.compliance.kaldi  # noqa: F401  # the real one where it works
    except (ImportError, OSError, RuntimeError):  # not installed, or built for another torch
        sys.modules.update({name: ModuleType(name) for name in NAMES})
        try:
            yield
        finally:
            for name in NAMES:
                del sys.modules[name]
    else:
        yield
