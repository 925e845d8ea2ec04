"""The demo as `make demo` runs it, on free ports."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from common.constants import SAMPLE_RATE
from scripts import demo

pytestmark = pytest.mark.server


@pytest.mark.parametrize("stack", ["dit", "unet"])
def test_the_demo_speaks_a_file_and_says_that_its_weights_are_random(
    stack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo.wav"
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    assert demo.main(["--stack", stack, "--text", "Two words.", "--output", str(output), *ports]) == 0
    info = soundfile.info(output)
    assert (info.samplerate, info.channels, info.subtype) == (SAMPLE_RATE, 1, "PCM_16")
    assert np.abs(soundfile.read(output)[0]).max() > 1e-3
    printed = capsys.readouterr().out
    for promised in ("first chunk", "total time", "audio length", "RANDOM"):
        assert promised in printed


def test_a_text_without_words_ends_the_demo_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    assert demo.main(["--text", " ", "--output", str(tmp_path / "demo.wav"), *ports]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and "target_text" in error
