"""The demo as run by `make demo`, on free ports: speech recognition finds its sentence."""

from pathlib import Path

import pytest
import soundfile
from cosyvoice_triton.cli import demo
from cosyvoice_triton.cli.demo import TEXT
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.evaluate.judges import Moonshine, at_16k, errors

pytestmark = pytest.mark.server

PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
MAX_WRONG_WORDS = 3  # of 14


def test_the_sentence_of_the_demo_is_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "demo.wav"
    assert demo.main(["--output", str(output), *PORTS]) == 0
    info = soundfile.info(output)
    assert (info.samplerate, info.channels, info.subtype) == (SAMPLE_RATE, 1, "PCM_16")
    printed = capsys.readouterr().out
    for promised in ("first chunk", "total time", "audio length", TEXT):
        assert promised in printed
    (recognised,) = Moonshine()([output], [at_16k(soundfile.read(output, dtype="float32")[0])])
    assert errors(TEXT, recognised)[0] <= MAX_WRONG_WORDS, recognised
