"""The samples of a load, and the requests built from the options of a command line."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton import samples
from cosyvoice_triton.client.arguments import add_voice_arguments
from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS, MIN_REFERENCE_SECONDS, TOKEN_RATE
from cosyvoice_triton.load.plan import Jobs, add_job_arguments
from cosyvoice_triton.load.samples import read_dataset, read_manifest
from cosyvoice_triton.text.segments import expected_seconds

VOICE = samples.FOLDER / "reference_zh.wav"


def row(**changes: Any) -> dict[str, Any]:
    good = {"id": "a", "target_text": "Hello.", "prompt_audio": str(VOICE), "prompt_text": "你好"}
    return {key: value for key, value in (good | changes).items() if value is not None}


def manifest(tmp_path: Path, *rows: dict[str, Any] | str) -> Path:
    path = tmp_path / "manifest.jsonl"
    lines = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in rows]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


def test_the_shipped_manifest_has_recordings_that_a_server_accepts() -> None:
    shipped = read_manifest(samples.MANIFEST)
    assert len(shipped) >= 10 and len({sample.id for sample in shipped}) == len(shipped)
    for sample in shipped:
        assert sample.prompt_audio is not None and sample.prompt_audio.wav.dtype == np.float32
        assert MIN_REFERENCE_SECONDS < sample.prompt_audio.seconds < MAX_REFERENCE_SECONDS
        assert sample.prompt_text and sample.target_text
    assert shipped[0].prompt_audio is shipped[2].prompt_audio, "a recording of several rows is loaded once"


def test_a_row_may_have_a_registered_speaker_instead_of_a_recording(tmp_path: Path) -> None:
    (sample,) = read_manifest(manifest(tmp_path, {"id": 7, "target_text": "Hello.", "speaker": "anna"}))
    assert (sample.id, sample.speaker, sample.prompt_audio, sample.prompt_text) == ("7", "anna", None, "")


def test_a_seed_tts_list_is_read(tmp_path: Path) -> None:
    path = tmp_path / "meta.lst"
    path.write_text(f"utt-1.wav|你好|{VOICE}|再见\nutt-2|你好|{VOICE}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 has 3 cells; expected id\|prompt_text\|prompt_audio\|target_text"):
        read_manifest(path)
    (sample,) = read_manifest(path, limit=1)
    assert (sample.id, sample.prompt_text, sample.target_text) == ("utt-1", "你好", "再见")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{'id': 1}", "line 2 is not JSON"),
        ("[1]", "line 2 is a list"),
        (row(id="b", target_text=None), "line 2 has no target_text; it has id, prompt_audio, prompt_text"),
        (row(id="b", prompt_audio=None, prompt_text=None), "has no prompt_audio and no prompt_text"),
        (row(id="b", target_text=3), "target_text is 3, not a text"),
        (row(id="b", target_text="  "), "target_text is '  ', it has no words"),
        (row(id="b", prompt_text=[]), r"prompt_text is \[\], not a text"),
        (row(id="b", speaker=3), "speaker is 3, not a text"),
        (row(id="b", prompt_audio=5), "prompt_audio is 5, not the path of a recording"),
        (row(id="b", prompt_audio="none.wav"), r"line 2: cannot read prompt_audio .*none\.wav"),
        (row(id="a"), "the id 'a' appears twice"),
        (row(id="../a"), r"id is '\.\./a'"),
        (row(id="b", target_audio_cosy2_tokens=[6561]), "target_audio_cosy2_tokens holds 6561"),
        (row(id="b", target_audio_cosy2_tokens=[[1], [2, 3]]), "target_audio_cosy2_tokens is not a list of integers"),
        (row(id="b", target_audio_cosy2_tokens=["<|s_1|>"]), "target_audio_cosy2_tokens is not a list of integers"),
        (row(id="b", target_audio_cosy2_tokens=[]), "target_audio_cosy2_tokens is not a list of integers"),
    ],
)
def test_an_error_in_a_row_names_the_line_and_the_column(bad: dict[str, Any] | str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        read_manifest(manifest(tmp_path, row(), bad))
    assert "\n" not in str(raised.value)


def test_an_empty_or_missing_manifest_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows"):
        read_manifest(manifest(tmp_path))
    with pytest.raises(ValueError, match="cannot read the manifest"):
        read_manifest(tmp_path / "missing.jsonl")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No network access, no retries, and a cache of the test's own."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def saved_dataset(directory: Path, rows: list[dict[str, Any]]) -> str:
    """The rows in the format of upstream's data sets on the hub: a parquet file with an audio column."""
    import datasets

    table = datasets.Dataset.from_list(rows).cast_column("prompt_audio", datasets.Audio())
    (directory / "data").mkdir()
    table.to_parquet(directory / "data" / "test_zh-00000-of-00001.parquet")
    return str(directory)


def test_a_dataset_in_the_format_of_upstream_is_read(tmp_path: Path, offline: None) -> None:
    tokens = {"prompt_audio_cosy2_tokens": [1, 2], "target_audio_cosy2_tokens": [3]}
    embedded = {"bytes": VOICE.read_bytes(), "path": None}
    rows = [row(id=f"utt-{index}", prompt_audio=embedded) | tokens | {"duration": 4.2} for index in range(3)]
    samples = read_dataset(saved_dataset(tmp_path, rows), "test_zh", limit=2)
    assert [sample.id for sample in samples] == ["utt-0", "utt-1"]
    (expected,) = read_manifest(manifest(tmp_path, row()))
    assert samples[1].prompt_audio is not None and expected.prompt_audio is not None
    assert samples[1].prompt_audio.digest == expected.prompt_audio.digest
    np.testing.assert_array_equal(samples[1].target_audio_cosy2_tokens, [3])


def test_a_dataset_with_other_columns_is_refused(tmp_path: Path, offline: None) -> None:
    rows = [row(prompt_audio={"bytes": VOICE.read_bytes(), "path": None}, target_text=None, text="Hello.")]
    with pytest.raises(ValueError, match="row 0 has no target_text; it has id, prompt_audio, prompt_text, text"):
        read_dataset(saved_dataset(tmp_path, rows), "test_zh")


def test_an_unreachable_dataset_is_reported_in_one_line_that_suggests_a_manifest(offline: None) -> None:
    with pytest.raises(ValueError, match="cannot load the split test_zh .* --manifest-path") as raised:
        read_dataset("yuekai/seed_tts", "test_zh")
    assert "\n" not in str(raised.value)


def test_without_the_package_datasets_the_error_names_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[datasets\]'"):
        read_dataset("yuekai/seed_tts", "test_zh")


MANIFEST = ("--manifest-path", str(samples.MANIFEST))
VOICE_OPTIONS = ("--reference-audio", str(samples.FOLDER / "reference_en.wav"), "--reference-text", "Words.")
ONE = ("--target-text", "Hello.", *VOICE_OPTIONS)


def jobs_of(*options: str) -> Jobs:
    parser = argparse.ArgumentParser()
    add_voice_arguments(parser)
    add_job_arguments(parser)
    return Jobs.from_arguments(parser.parse_args(options))


def test_rows_are_repeated_in_order_with_distinct_names() -> None:
    names = [job.id for job in jobs_of(*MANIFEST, "--num-requests", "3").take(7)]
    assert names == ["en-01", "zh-01", "en-02", "en-01@2", "zh-01@2", "en-02@2", "en-01@3"]


def test_every_request_has_the_timeline_parameter_besides_the_given_ones() -> None:
    (job,) = jobs_of(*ONE, "--seed", "3", "--parameter", "max_tokens=212", "--parameter", "top_p=0.5").take(1)
    assert job.id == "test" and job.utterance().reference_text == "Words."
    assert job.utterance().parameters == {"seed": 3, "max_tokens": 212, "top_p": "0.5", "timeline": True}


def test_a_new_voice_is_a_recording_of_its_own_length_in_every_request() -> None:
    (job,) = jobs_of(*ONE, "--new-voices").take(1)
    (known,) = jobs_of(*ONE).take(1)
    first, second, plain = (each.utterance().reference for each in (job, job, known))
    assert first is not None and second is not None and plain is not None
    assert not np.array_equal(first, second)
    assert 0.9 * plain.size <= first.size <= plain.size
    np.testing.assert_array_equal(first[:-8], plain[: first.size - 8])
    assert 0 < np.abs(first - plain[: first.size]).max() <= 1e-3


WAV = {"reference_wav", "reference_wav_len"}


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (("--use-spk2info-cache",), set()),
        (("--use-spk2info-cache", "True"), set()),
        (("--speaker", "anna"), {"speaker"}),
        (("--cross-lingual",), WAV),
        (("--instruct-text", "Slowly."), WAV | {"instruct_text"}),
    ],
)
def test_options_replace_the_voice_or_the_transcript_of_every_row(options: tuple[str, ...], sent: set[str]) -> None:
    for job in jobs_of(*MANIFEST, *options).take(10):
        assert job.utterance().arrays().keys() - {"reference_sample_rate"} == {"target_text"} | sent


def test_a_realistic_load_has_answers_of_1_to_30_s_new_voices_and_cancelled_requests() -> None:
    jobs = jobs_of(*MANIFEST, "--realistic").take(1000)
    seconds = [int(job.base.parameters["max_tokens"]) / TOKEN_RATE for job in jobs]
    assert min(seconds) < 2 and max(seconds) > 29 and np.mean(seconds) == pytest.approx(15.5, rel=0.1)
    assert all(expected_seconds(job.base.target_text) > of - 0.1 for job, of in zip(jobs, seconds, strict=True))
    left = [job.cancel_after / of for job, of in zip(jobs, seconds, strict=True) if job.cancel_after is not None]
    assert 70 < len(left) < 130 and 0 < min(left) < 0.2 and 0.8 < max(left) <= 1.1, "while they are heard"
    assert 30 < sum(job.new_voice for job in jobs) < 70
