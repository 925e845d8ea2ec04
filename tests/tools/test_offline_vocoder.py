"""cli/token2wav.py and cli/streaming_inference.py with the demo checkpoint, whose weights are random."""

import json

import pytest
from cosyvoice_triton.cli import streaming_inference, token2wav
from cosyvoice_triton.constants import SAMPLE_RATE, SPEECH_VOCAB, TOKEN_RATE
from cosyvoice_triton.voice.audio import load_audio

from tests.tools.conftest import ROWS, STACKS, TOKEN_SAMPLES

pytestmark = pytest.mark.slow  # each test renders audio

LENGTHS = {"first": 60, "second": 140, "third": 4}
WITH_TOKENS = [
    {**row, "target_audio_cosy2_tokens": [7 * i % SPEECH_VOCAB for i in range(LENGTHS[row["id"]])]} for row in ROWS
]


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
