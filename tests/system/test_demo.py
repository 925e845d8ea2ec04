"""The demo as run by `make demo`, on free ports: speech recognition finds its sentence."""

from pathlib import Path

import pytest
import soundfile
from cosyvoice_triton.cli import demo
from cosyvoice_triton.cli.demo import TEXT
from cosyvoice_triton.constants import SAMPLE_RATE

from demo_voice.evaluation.recognition import Recognizer, word_errors

pytestmark = pytest.mark.server

PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
# "Cosy" is not in the recogniser's vocabulary; it returns "cause she voice, which runs on your own computer".
MAX_WORD_ERRORS = 0.3


@pytest.mark.parametrize("stack", ["dit", "unet"])
def test_the_sentence_of_the_demo_is_recognised(stack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "demo.wav"
    assert demo.main(["--stack", stack, "--output", str(output), *PORTS]) == 0
    info = soundfile.info(output)
    assert (info.samplerate, info.channels, info.subtype) == (SAMPLE_RATE, 1, "PCM_16")
    printed = capsys.readouterr().out
    for promised in ("first chunk", "total time", "audio length", TEXT):
        assert promised in printed
    recognised = Recognizer().transcribe(soundfile.read(output, dtype="float32")[0], SAMPLE_RATE)
    assert word_errors(TEXT, recognised).rate <= MAX_WORD_ERRORS, recognised
