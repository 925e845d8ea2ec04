"""The speech service over a stub of Triton, as for its own tests."""

from tests.speech_service.conftest import served  # noqa: F401
