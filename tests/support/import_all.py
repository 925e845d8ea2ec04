"""Imports every module of the package under a Python that has none of the libraries: `python3.10 import_all.py common`.

What is missing is replaced by a class that stands for anything, so that only Python itself and its own library are
tested: a `typing.Self` fails before 3.11, wherever it is.
"""

import importlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types


class Anything(type):
    """The metaclass of what stands for a missing class, function, module or value."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *arguments, **options):
        # As a decorator it leaves what it decorates.
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], types.FunctionType) else cls

    def __mro_entries__(cls, bases):
        return ()

    def __iter__(cls):
        return iter(())

    def __float__(cls):
        return 1.0

    __or__ = __ror__ = __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __sub__ = __neg__ = (
        __call__
    )


class Missing(metaclass=Anything):
    pass


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, as the last one, what no other finder has."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("cosyvoice_triton") or name.partition(".")[0] in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: Anything.__getattr__(Missing, name)
        return module

    def exec_module(self, module):
        pass


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    sys.path.insert(0, str(root))
    sys.meta_path.append(Finder())
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] != "__main__" and "templates" not in parts:
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
