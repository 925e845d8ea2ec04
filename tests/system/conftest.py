"""The voice of requests to the real server."""

import numpy as np
import pytest
from cosyvoice_triton.client.requests import read_reference

from tests.support.server_requests import VOICE


@pytest.fixture(scope="session")
def voice() -> np.ndarray:
    return read_reference(VOICE)
