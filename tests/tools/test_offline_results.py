"""The output folder of an offline run, and which samples a second run keeps."""

import json
from dataclasses import replace

import numpy as np
import pytest
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.samples import Sample, SampleError
from cosyvoice_triton.offline.results import JOURNAL, OutputFolder, identity
from cosyvoice_triton.offline.stages import Stages
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.prompt import Recording

SETTINGS = {"backend": "hf", "seed": 0}
SAMPLE = Sample("a", "Hello.", Recording(np.full(100, 0.5, np.float32)), "The transcript.")
AUDIO = np.linspace(-0.5, 0.5, SAMPLE_RATE, dtype=np.float32)
TOKENS = np.array([5, 6560])


def save(path, *samples, settings=SETTINGS):
    folder = OutputFolder(path, settings)
    for sample in samples:
        folder.save(sample, AUDIO, TOKENS, cut_short=False)


def holds(path, sample, settings=SETTINGS):
    return OutputFolder(path, settings).holds(sample)


def test_a_finished_sample_is_saved_with_its_tokens(tmp_path):
    save(tmp_path / "new" / "folder", SAMPLE)
    audio = load_audio(tmp_path / "new" / "folder" / "a.wav", SAMPLE_RATE)
    np.testing.assert_allclose(audio, AUDIO, atol=1e-4)
    (line,) = (tmp_path / "new" / "folder" / JOURNAL).read_text().splitlines()
    record = json.loads(line)
    assert record["id"] == "a" and record["seconds"] == 1.0 and record["target_audio_cosy2_tokens"] == [5, 6560]
    assert holds(tmp_path / "new" / "folder", SAMPLE)


@pytest.mark.parametrize(
    "changed",
    [
        {"target_text": "Bye."},
        {"prompt_text": "Another transcript."},
        {"prompt_audio": Recording(np.full(100, 0.4, np.float32))},
        {"id": "b"},
    ],
)
def test_a_sample_with_another_text_or_voice_is_not_finished(tmp_path, changed):
    save(tmp_path, SAMPLE)
    assert not holds(tmp_path, replace(SAMPLE, **changed))


def test_samples_with_other_settings_replace_the_earlier_ones(tmp_path):
    save(tmp_path, SAMPLE)
    other = SETTINGS | {"seed": 1}
    assert not holds(tmp_path, SAMPLE, other)
    save(tmp_path, SAMPLE, settings=other)
    assert holds(tmp_path, SAMPLE, other) and not holds(tmp_path, SAMPLE)


def test_a_sample_without_audio_or_with_an_incomplete_line_is_not_finished(tmp_path):
    save(tmp_path, SAMPLE, replace(SAMPLE, id="b"))
    journal = tmp_path / JOURNAL
    journal.write_text(journal.read_text()[:-30])  # as if killed while writing the last line
    assert holds(tmp_path, SAMPLE) and not holds(tmp_path, replace(SAMPLE, id="b"))
    save(tmp_path, replace(SAMPLE, id="b"))
    assert holds(tmp_path, SAMPLE) and holds(tmp_path, replace(SAMPLE, id="b"))
    (tmp_path / "a.wav").unlink()
    assert not holds(tmp_path, SAMPLE)


def test_an_unwritable_folder_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SampleError, match="cannot write to .*; choose another folder"):
        OutputFolder(tmp_path / "file", SETTINGS)


def test_a_replaced_checkpoint_has_another_identity(tmp_path):
    (tmp_path / "flow.pt").write_bytes(b"1")
    before = identity(tmp_path)
    assert before == identity(tmp_path)
    (tmp_path / "flow.pt").write_bytes(b"12")
    assert before != identity(tmp_path)


def test_the_time_of_each_stage_is_reported_also_per_second_of_audio():
    clock = iter([0.0, 1.0, 3.0, 3.0, 7.0, 10.0])
    stages = Stages(("llm", "token2wav", "idle"), lambda: next(clock))
    with stages.time("llm"):
        pass
    with pytest.raises(ValueError), stages.time("token2wav"):
        raise ValueError("the time of a failed stage counts")
    figures = stages.figures(audio_seconds=20.0, total=stages.total())
    assert figures == {
        "llm_time_seconds": 2.0,
        "llm_rtf": 0.1,
        "token2wav_time_seconds": 4.0,
        "token2wav_rtf": 0.2,
        "idle_time_seconds": 0.0,
        "idle_rtf": 0.0,
        "pipeline_time_seconds": 10.0,
        "pipeline_rtf": 0.5,
    }
    assert stages.figures(0.0, 1.0)["llm_rtf"] is None
