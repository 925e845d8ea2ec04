"""A service over a stub of Triton, whose folder of voices is empty."""

from collections.abc import Iterator

import pytest

from tests.support.speech_fixtures import StubbedService, service_with_stub


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubbedService]:
    with service_with_stub(tmp_path_factory.mktemp("voices")) as service:
        yield service
