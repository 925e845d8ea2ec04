"""The list of mutations, which `python -m tests.mutations` runs."""

from tests.conftest import ROOT
from tests.mutations.__main__ import read


def test_every_mutation_applies_to_the_code_and_names_tests_that_exist() -> None:
    stale = []
    for mutation in read():
        path = ROOT / mutation.file
        named = [ROOT / word.partition("::")[0] for word in mutation.tests.split() if word.startswith("tests/")]
        if not path.exists() or mutation.applied(path.read_text()) is None or not all(test.exists() for test in named):
            stale.append(f"{mutation.package}: {mutation.what}")
    assert stale == []
