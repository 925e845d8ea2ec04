"""cli/offline_inference.py, cli/token2wav.py and cli/streaming_inference.py with the demo checkpoint, whose weights are
random."""

import json

import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.cli import offline_inference, streaming_inference, token2wav
from cosyvoice_triton.cli.offline_inference import GIVE_UP_BATCHES, JOURNAL, LOG, OutputFolder
from cosyvoice_triton.constants import SAMPLE_RATE, SPEECH_VOCAB, TOKEN_RATE
from cosyvoice_triton.voice.audio import load_audio

from tests.support.http_servers import TOKENS, llm_server, reply
from tests.tools.conftest import ROWS, STACKS, TOKEN_SAMPLES

pytestmark = pytest.mark.slow  # each test runs the whole offline pipeline
UPSTREAMS_KEYS = {
    "args",
    "data_load_time_seconds",
    "llm_time_seconds",
    "token2wav_time_seconds",
    "audio_save_time_seconds",
    "total_audio_duration_seconds",
    "pipeline_time_seconds",
}
LENGTHS = {"first": 60, "second": 140, "third": 4}
WITH_TOKENS = [
    {**row, "target_audio_cosy2_tokens": [7 * i % SPEECH_VOCAB for i in range(LENGTHS[row["id"]])]} for row in ROWS
]


@pytest.fixture
def synthesize(demo_models, tmp_path, manifest):
    """`synthesize("--batch-size", "2", rows=..., stack="unet")` -> exit code; the folder is tmp_path / "out"."""

    def run(*options, rows=ROWS, stack="dit", backend="onnxruntime_genai"):
        return offline_inference.main(
            [
                *("--output-dir", str(tmp_path / "out"), "--manifest-path", str(manifest(*rows)), "--device", "cpu"),
                *("--llm-model-name-or-path", str(demo_models / stacks.named(stack).llm.directory)),
                *("--backend", backend),
                *("--token2wav-path", str(demo_models / STACKS[stack]), *options),
            ]
        )

    return run


def records(folder):
    """The last line of each sample."""
    return {record["id"]: record for record in map(json.loads, (folder / JOURNAL).read_text().splitlines())}


def log_of(folder):
    return json.loads((folder / LOG).read_text())


@pytest.mark.parametrize(("stack", "backend"), [("dit", "onnxruntime_genai"), ("unet", "hf")])
def test_an_audio_file_per_sample_and_the_figures_are_written(synthesize, tmp_path, capsys, stack, backend):
    assert synthesize("--batch-size", "2", "--token2wav-batch-size", "3", stack=stack, backend=backend) == 0
    log, made = log_of(tmp_path / "out"), records(tmp_path / "out")
    assert sorted(made) == ["first", "second", "third"]
    for name, record in made.items():
        audio = load_audio(tmp_path / "out" / f"{name}.wav", SAMPLE_RATE)
        assert len(audio) == TOKEN_SAMPLES * len(record["target_audio_cosy2_tokens"]) and audio.std() > 1e-4
    assert log.keys() >= UPSTREAMS_KEYS
    assert (log["samples_finished"], log["failures"]) == (3, [])
    assert log["vocoder"] == f"{stack} token2wav, RANDOM weights"
    assert log["total_audio_duration_seconds"] == pytest.approx(sum(record["seconds"] for record in made.values()))
    stages = [log[f"{stage}_time_seconds"] for stage in ("voice", "text", "llm", "token2wav", "audio_save")]
    assert all(0 < seconds < log["pipeline_time_seconds"] for seconds in stages)
    assert log["llm_rtf"] == pytest.approx(log["llm_time_seconds"] / log["total_audio_duration_seconds"])
    printed = capsys.readouterr().out
    assert "| Backend | Batch Size | llm_time_seconds | total_time_seconds | RTF |" in printed
    assert f"| {backend} | 2 | " in printed


def test_a_second_run_synthesizes_only_missing_samples(synthesize, tmp_path, capsys):
    assert synthesize(rows=ROWS[:2]) == 0
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.wav")}
    capsys.readouterr()
    assert synthesize() == 0
    assert "2 of 3 samples are finished" in capsys.readouterr().out
    assert log_of(tmp_path / "out")["samples_finished"] == 1 and log_of(tmp_path / "out")["samples_kept"] == 2
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written} == written
    assert synthesize("--batch-size", "3") == 0  # the audio does not depend on it
    assert "3 of 3 samples are finished" in capsys.readouterr().out


def test_failed_samples_are_named_and_the_others_are_synthesized(synthesize, tmp_path, capsys):
    silent = {**ROWS[0], "id": "silent", "prompt_audio": "silence.wav"}
    no_words = {**ROWS[0], "id": "no_words", "target_text": "?!"}
    assert synthesize("--batch-size", "4", rows=[silent, ROWS[0], no_words]) == 1
    failures = {failure["id"]: failure for failure in log_of(tmp_path / "out")["failures"]}
    assert failures["silent"]["stage"] == "voice" and "is silent" in failures["silent"]["error"]
    assert failures["no_words"]["stage"] == "text" and "nothing to speak" in failures["no_words"]["error"]
    assert sorted(records(tmp_path / "out")) == ["first"] and (tmp_path / "out" / "first.wav").exists()
    assert "failed: silent (voice): " in capsys.readouterr().err
    assert synthesize("--batch-size", "4", rows=[silent, ROWS[0], {**no_words, "target_text": "Yes."}]) == 1
    assert log_of(tmp_path / "out")["samples_kept"] == 1 and sorted(records(tmp_path / "out")) == ["first", "no_words"]
    assert synthesize(rows=[{**ROWS[0], "target_text": "?!"}]) == 1
    assert not (tmp_path / "out" / "first.wav").exists(), "of the text before"


def test_one_recording_can_replace_the_voices_of_all_samples(synthesize, tmp_path, capsys):
    options = ("--prompt-speech-path", str(tmp_path / "other.wav"), "--prompt-text", "Your call.")
    assert synthesize(*options, rows=ROWS[:1]) == 0
    assert synthesize(rows=[{**ROWS[0], "prompt_audio": "other.wav"}]) == 0
    assert "1 of 1 samples are finished" in capsys.readouterr().out


def test_an_llm_server_is_used_and_given_up_after_repeated_failures(synthesize, tmp_path):
    """A long text is synthesized in segments, with one answer of the LLM per segment."""
    long = {**ROWS[1], "target_text": "The train to the coast leaves from platform four in twelve minutes. " * 6}
    with llm_server() as (server, url):
        options = ("--openai-api-base", f"{url}/v1/chat/completions", "--batch-size", "2")
        assert synthesize(*options, "--token2wav-batch-size", "2", rows=[ROWS[0], long], backend="trtllm-serve") == 0
        tokens = {name: record["target_audio_cosy2_tokens"] for name, record in records(tmp_path / "out").items()}
        assert len(tokens["first"]) == TOKENS
        assert tokens["second"] == tokens["first"] * (len(tokens["second"]) // TOKENS) != tokens["first"]
        audio = load_audio(tmp_path / "out" / "second.wav", SAMPLE_RATE)
        assert len(audio) == TOKEN_SAMPLES * len(tokens["second"])
        server.answers = [[reply("500 Internal Server Error", b"out of memory")]]
        many = [{**ROWS[0], "id": str(index)} for index in range(GIVE_UP_BATCHES + 2)]
        assert synthesize("--openai-api-base", url, rows=[ROWS[0], *many], backend="trtllm-serve") == 1
    errors = [failure["error"] for failure in log_of(tmp_path / "out")["failures"]]
    assert len(errors) == len(many)
    assert all("HTTP 500" in error for error in errors[:GIVE_UP_BATCHES])
    assert all("not tried: the LLM was unavailable" in error for error in errors[GIVE_UP_BATCHES:])


def test_an_interrupted_run_keeps_the_finished_samples(synthesize, tmp_path, monkeypatch, capsys):
    record = OutputFolder.record

    def interrupted(folder, sample, *rest):
        if sample.id == "second":
            raise KeyboardInterrupt
        record(folder, sample, *rest)

    monkeypatch.setattr(OutputFolder, "record", interrupted)
    assert synthesize() == 130
    assert "finished samples are kept, the same command continues" in capsys.readouterr().err
    assert log_of(tmp_path / "out")["samples_finished"] == 1 and sorted(records(tmp_path / "out")) == ["first"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-text", "Who says it?"], "is the transcript of --prompt-speech-path"),
        (["--split-name", "test_zh"], "a manifest or a data set, not both"),
        (["--engine-dir", "/nowhere"], "/nowhere is not a directory"),
        (["--token2wav-path", "/nowhere"], "/nowhere is not a directory"),
        (["--temperature", "-1"], "temperature -1.0 is out of range"),
    ],
)
def test_an_invalid_command_line_is_reported_in_one_line(synthesize, capsys, options, message):
    assert synthesize(*options) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.fixture
def run(demo_models, tmp_path, manifest, capsys):
    """`run(tool, *options, rows=..., stack=...)` -> exit code, standard output, standard error."""

    def run_tool(tool, *options, rows=WITH_TOKENS, stack="dit"):
        code = tool.main(
            [
                *("--model-dir", str(demo_models / STACKS[stack]), "--output-dir", str(tmp_path / "out")),
                *("--manifest-path", str(manifest(*rows)), "--device", "cpu", *options),
            ]
        )
        return code, *capsys.readouterr()

    return run_tool


def samples_of(path):
    return len(load_audio(path, SAMPLE_RATE))


@pytest.mark.parametrize("stack", sorted(STACKS))
@pytest.mark.parametrize("mode", [[], ["--streaming"]])
def test_token2wav_renders_every_sample(run, tmp_path, stack, mode):
    code, out, _ = run(token2wav, "--batch-size", "2", *mode, stack=stack)
    assert code == 0
    for name, tokens in LENGTHS.items():
        assert samples_of(tmp_path / "out" / f"{name}.wav") == TOKEN_SAMPLES * tokens
    figures = json.loads((tmp_path / "out" / "token2wav.json").read_text())
    assert figures["total_audio_duration_seconds"] == pytest.approx(sum(LENGTHS.values()) / TOKEN_RATE)
    assert figures["token2wav_rtf"] == pytest.approx(
        figures["token2wav_time_seconds"] / figures["total_audio_duration_seconds"]
    )
    assert f"{stack} token2wav, RANDOM weights, {'streamed (exponential)' if mode else 'whole'}, batches of 2" in out
    assert "Measurement epoch time taken: " in out and "resynthesize their recordings" not in out


def test_a_sample_without_tokens_resynthesizes_its_recording(run, tmp_path):
    code, out, _ = run(token2wav, rows=[*ROWS[:1], WITH_TOKENS[2]])
    assert code == 0 and "1 of 2 samples have no tokens and resynthesize their recordings" in out
    assert samples_of(tmp_path / "out" / "first.wav") == SAMPLE_RATE  # the recording lasts one second


def test_tokens_are_read_from_a_file_by_id(run, tmp_path):
    path = tmp_path / "samples.jsonl"
    lines = [json.dumps({"id": name, "target_audio_cosy2_tokens": list(range(9))}) for name in LENGTHS]
    path.write_text("\n".join(lines))
    assert run(token2wav, "--tokens-path", str(path), rows=ROWS)[0] == 0
    assert [samples_of(tmp_path / "out" / f"{name}.wav") for name in LENGTHS] == [9 * TOKEN_SAMPLES] * 3
    path.write_text(lines[0])
    code, _, error = run(token2wav, "--tokens-path", str(path), rows=ROWS)
    assert code == 1 and "has no tokens for 2 sample(s), the first is 'second'" in error
    path.write_text("[]")
    assert "`cosyvoice-triton offline` writes such a file" in run(token2wav, "--tokens-path", str(path), rows=ROWS)[2]


@pytest.mark.parametrize("tool", [token2wav, streaming_inference])
def test_failed_samples_are_named_and_the_others_are_rendered(run, tmp_path, tool):
    silent = {**WITH_TOKENS[2], "id": "silent", "prompt_audio": "silence.wav"}
    too_long = {**WITH_TOKENS[2], "id": "too_long", "target_audio_cosy2_tokens": [1] * 3001}
    options = ["--streaming"] if tool is token2wav else ["--strategy", "exponential"]
    code, _, error = run(tool, "--batch-size", "3", *options, rows=[silent, WITH_TOKENS[2]])
    assert code == 1 and "failed: silent (voice): " in error
    assert samples_of(tmp_path / "out" / "third.wav") == 4 * TOKEN_SAMPLES
    code, _, error = run(token2wav, rows=[too_long, WITH_TOKENS[2]])
    assert code == 1 and "failed: too_long (token2wav): the stream has 3001 speech tokens; the limit is 3000" in error


# Chunks of streams of 60, 140 and 4 tokens in batches of two, and those of the longest stream of each batch. With the
# UNet flow the first chunk ends at a chunk boundary; its prompts have 25, 25 and 30 tokens.
@pytest.mark.parametrize(
    ("stack", "strategy", "chunks", "longest"),
    [
        ("dit", "equal", 3 + 6 + 1, 6 + 1),  # 25 25 10, 25 25 25 25 25 15, 4
        ("dit", "exponential", 2 + 3 + 1, 3 + 1),  # 25 35, 25 50 65, 4
        ("unet", "exponential", 3 + 4 + 1, 4 + 1),  # 25 25 10, 25 25 50 40, 4
    ],
)
def test_streaming_reports_calls_and_times(run, tmp_path, stack, strategy, chunks, longest):
    code, out, _ = run(streaming_inference, "--strategy", strategy, "--batch-size", "2", stack=stack)
    figures = json.loads((tmp_path / "out" / f"streaming-{strategy}.json").read_text())
    assert code == 0 and f"Total flow matching forward calls: {figures['forward_calls']}\n" in out
    assert len(figures["passes"]) == 2  # of new and of known voices
    for each in figures["passes"]:
        assert each["chunks"] == chunks and longest <= each["forward_calls"] <= chunks
        assert 0 < each["first_chunk_ms"] < 1000 * each["token2wav_time_seconds"]
    for name, tokens in LENGTHS.items():
        assert samples_of(tmp_path / "out" / f"{name}.wav") == TOKEN_SAMPLES * tokens
