"""A service with low limits over a stub of Triton, whose folder of voices is empty."""

from collections.abc import Iterator

import pytest

from tests.support.speech_fixtures import StubbedService, service_with_stub


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubbedService]:
    low = {"max_streams": 4, "max_sessions": 2, "max_reference_mb": 1, "max_batch": 3}
    with service_with_stub(tmp_path_factory.mktemp("voices"), **low) as service:
        yield service
