"""An empty torchaudio for packages that import it and need nothing of it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

NAMES = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")


@contextmanager
def torchaudio_or_stand_in() -> Iterator[None]:
    """For the import of such a package, with or without torchaudio.

    torchaudio's wheel does not load beside a CPU build of torch, so CPU machines have none: empty modules stand in
    during the import and no longer, because other packages look torchaudio up to decide what they offer.
    """
    try:
        import torchaudio.compliance.kaldi  # noqa: F401  # the real one where it works
    except (ImportError, OSError, RuntimeError):  # not there, or built for another torch
        sys.modules.update({name: ModuleType(name) for name in NAMES})
        try:
            yield
        finally:
            for name in NAMES:
                del sys.modules[name]
    else:
        yield
