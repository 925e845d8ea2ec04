"""Recordings that are no audio, or audio of another scale: an error that says so, and nothing else."""

import io
from contextlib import suppress

import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.voice.audio import load_audio, validate_reference


@pytest.mark.parametrize("peak", [5.0, 128.0, 32_767.0, 1e38, -32_768.0])
def test_samples_that_are_not_in_the_unit_range_are_refused_by_their_value(peak: float) -> None:
    wav = np.full(PROMPT_SAMPLE_RATE, 0.1, np.float32)
    wav[100] = peak
    with pytest.raises(ValueError, match=r"holds a sample of \S+: samples are -1..1; divide 16-bit ones by 32768"):
        validate_reference(wav)


@pytest.mark.parametrize("peak", [1.0, 1.4, 2.0])
def test_samples_that_decoding_lets_exceed_full_scale_are_taken(peak: float) -> None:
    wav = np.full(PROMPT_SAMPLE_RATE, 0.1, np.float32)
    wav[100] = peak
    assert validate_reference(wav).max() == np.float32(peak)


def test_a_malformed_file_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """cffi prints one for each exception of a call by libsndfile, such as a seek to before the file's begin."""
    random = np.random.default_rng(0)
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        whole = io.BytesIO()
        sf.write(whole, random.standard_normal(4000) * 0.1, PROMPT_SAMPLE_RATE, format=kind)
        for _ in range(150):
            data = bytearray(whole.getvalue()[: random.integers(40, len(whole.getvalue()))])
            data[random.integers(0, 40)] = random.integers(256)
            with suppress(ValueError, RuntimeError):
                load_audio(io.BytesIO(data), PROMPT_SAMPLE_RATE, max_seconds=30)
    assert "Traceback" not in capfd.readouterr().err
