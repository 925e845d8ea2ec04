"""The evaluation of the demo voice: word errors, speaker similarity, figures."""

from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton.client.requests import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint.checkpoint import TRAINED
from cosyvoice_triton.demo_checkpoint.make import VOICES_DIR
from cosyvoice_triton.voice.audio import load_audio, save_audio
from cosyvoice_triton.voice.encoders import SpeakerEncoder

from demo_voice.evaluation import __main__ as evaluate_voice
from demo_voice.evaluation import measures
from demo_voice.evaluation.recognition import Recognizer, WordErrors, word_errors, words
from demo_voice.evaluation.takes import Series, Take, copy_synthesis, read_teacher, request_takes
from tests.support.checkpoints import DIT_DIR
from tests.support.speech_fixtures import stub_triton
from tests.support.triton_stub import TritonStub


def recording(name: str) -> Take:
    """The recording of a voice in the trained checkpoint."""
    path = TRAINED / VOICES_DIR / f"{name}.wav"
    return Take(path.with_suffix(".txt").read_text(), load_audio(path, PROMPT_SAMPLE_RATE), PROMPT_SAMPLE_RATE)


# --- words -------------------------------------------------------------------------------------------------------


def test_words_are_compared_without_punctuation_and_case() -> None:
    assert words("It's four o'clock, Anna!") == ["its", "four", "oclock", "anna"]


@pytest.mark.parametrize(
    ("text", "recognised", "errors"),
    [
        ("one two three", "one two three", 0),
        ("one two three", "one three", 1),
        ("one two three", "one and two three", 1),
        ("one two three", "one too three", 1),
        ("one two three", "three one two", 2),
        ("one two three", "", 3),
    ],
)
def test_wrong_words_are_counted(text: str, recognised: str, errors: int) -> None:
    assert word_errors(text, recognised) == WordErrors(errors, 3)


@pytest.mark.slow
def test_the_recogniser_works_on_the_teacher_and_does_not_depend_on_earlier_takes() -> None:
    recognizer, takes = Recognizer(), [recording("slt"), recording("rms")]
    first = [recognizer.transcribe(take.waveform, take.rate) for take in takes]
    assert [recognizer.transcribe(take.waveform, take.rate) for take in reversed(takes)] == first[::-1]
    errors = [word_errors(take.text, recognised) for take, recognised in zip(takes, first, strict=True)]
    assert (errors[0] + errors[1]).rate < 0.4, first


def test_no_words_are_recognised_in_silence() -> None:
    assert words(Recognizer().transcribe(np.zeros(SAMPLE_RATE, np.float32), SAMPLE_RATE)) in ([], ["the"], ["a"])


# --- voices, parts -----------------------------------------------------------------------------------------


def test_a_recording_is_nearest_to_its_own_voice() -> None:
    whole = {name: recording(name) for name in ("slt", "rms")}
    halves = {
        name: [Take("", part, take.rate) for part in np.array_split(take.waveform, 2)] for name, take in whole.items()
    }
    encoder = SpeakerEncoder(TRAINED / DIT_DIR)
    voices = {name: parts[:1] for name, parts in halves.items()}
    assert measures.nearest(encoder, [halves["slt"][1], halves["rms"][1]], voices) == ["slt", "rms"]


def test_copy_synthesis_is_as_long_as_the_teacher() -> None:
    teacher = Series("teacher", "", "slt", [recording("slt")])
    (take,) = copy_synthesis(TRAINED / DIT_DIR, teacher, "dit").takes
    assert take.seconds == pytest.approx(teacher.takes[0].seconds, abs=0.05)
    assert 0.01 < np.abs(take.waveform).max() <= 1


def test_recordings_of_the_teacher_are_found_by_sentence_number(tmp_path: Path) -> None:
    (tmp_path / "slt").mkdir()
    for number in range(2):
        save_audio(tmp_path / "slt" / f"{number:02d}.wav", np.full(1600 * (number + 1), 0.1), PROMPT_SAMPLE_RATE)
    series = read_teacher(tmp_path, "slt", ["One.", "Two."])
    assert [take.seconds for take in series.takes] == pytest.approx([0.1, 0.2])
    with pytest.raises((OSError, RuntimeError), match=r"02\.wav"):
        read_teacher(tmp_path, "slt", ["One.", "Two.", "Three."])


def test_takes_have_times() -> None:
    with stub_triton(TritonStub(chunks=3, pause=0.05)) as address:
        (take,) = request_takes(address, "cosyvoice2_dit", "streaming", [Utterance("Hello.")])
        (whole,) = request_takes(address, "cosyvoice2_dit", "offline", [Utterance("Hello.")])
    size = SAMPLE_RATE // 5
    assert len(take.waveform) == len(whole.waveform) == 3 * size
    assert take.first_chunk is not None and take.total is not None and take.first_chunk < take.total


def test_the_table_has_the_figures_of_each_series() -> None:
    teacher = Series("teacher", "", "slt", [Take("", np.zeros(SAMPLE_RATE, np.float32))])
    take = Take("One two three four five.", np.zeros(SAMPLE_RATE, np.float32), first_chunk=0.3, total=0.6)
    row = measures.figures(Series("streamed", "dit", "slt", [take]), ["one two three four"], teacher)
    line = "| streamed | dit | slt | 20.0% | 1.00 (1.00–1.00) | 0.60 | 300 ms, p95 300 ms |"
    assert line in measures.table([row])


def test_a_missing_recording_of_the_teacher_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--models", str(TRAINED), "--teacher", str(tmp_path), "--output", str(tmp_path / "out")]
    assert evaluate_voice.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("demo_voice.evaluation: ") and "00.wav" in line
