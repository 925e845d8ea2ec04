"""The voice of requests to the real server."""

import numpy as np
import pytest
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.voice.audio import load_audio

from tests.support.server_requests import VOICE


@pytest.fixture(scope="session")
def voice() -> np.ndarray:
    return load_audio(VOICE, PROMPT_SAMPLE_RATE)
