"""The load generator against the real tritonserver with the demo checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
from cosyvoice_triton import samples
from cosyvoice_triton.cli import client_grpc
from cosyvoice_triton.load import benchmark
from cosyvoice_triton.speech_service.settings import Settings

from tests.support.speech_fixtures import serving

pytestmark = pytest.mark.server


Serve = Callable[..., Any]


def measure(address: str, log_dir: Path, *more: object) -> int:
    host, port = address.split(":")
    return client_grpc.main(["--server-addr", host, "--server-port", port, "--log-dir", str(log_dir), *map(str, more)])


def summary(log_dir: Path) -> dict[str, Any]:
    return json.loads((log_dir / "summary.json").read_text())


def test_16_concurrent_streams_are_all_answered_with_their_stages(serve: Serve, tmp_path: Path) -> None:
    more = ("--manifest-path", samples.MANIFEST, "--num-tasks", 16, "--num-requests", 20, "--warmup-requests", 2)
    assert measure(serve(stack="dit").grpc_url, tmp_path, *more) == 0
    result = summary(tmp_path)
    assert (result["requests"], result["errors"], result["unsent"], result["warmup_requests"]) == (20, 0, 0, 2)
    assert len(list(tmp_path.glob("*.wav"))) == 20
    assert result["audio_seconds"] == pytest.approx(
        sum(soundfile.info(path).duration for path in tmp_path.glob("*.wav"))
    )
    assert result["rtf"] == pytest.approx(result["processing_seconds"] / result["audio_seconds"])
    for stream in result["streams"]:
        assert set(stream["stages_ms"]) == {"voice", "llm", "prompt_cache", "tokens", "audio", "transport"}
        assert sum(stream["stages_ms"].values()) == pytest.approx(stream["arrivals_ms"][0], abs=0.1)
        assert min(stream["stages_ms"].values()) >= 0
    requests = {model["name"]: model["requests"] for model in result["models"]}
    assert requests["cosyvoice2_dit"] == 20 and requests["token2wav_dit"] > 40
    assert "model name is cosyvoice2_dit" in (tmp_path / "stats_summary-manifest.txt").read_text()


def test_new_voices_are_not_in_the_caches_of_the_server(serve: Serve, tmp_path: Path) -> None:
    address, more = serve(stack="dit").grpc_url, ("--manifest-path", samples.MANIFEST, "--num-requests", 2)
    counts = []
    for directory, new in (("known", ()), ("new", ("--new-voices",))):
        assert measure(address, tmp_path / directory, *more, *new, "--warmup-requests", 2) == 0
        models = summary(tmp_path / directory)["models"]
        counts.append([(m["requests"], m["cache_hits"]) for m in models if m["name"] == "audio_tokenizer"])
    assert counts == [[], [(2, 0)]]  # the orchestrator caches the tokens of known voices


def test_a_sweep_over_two_addresses_writes_tables_and_a_plot(serve: Serve, tmp_path: Path) -> None:
    port = serve(stack="dit").grpc_url.split(":")[1]
    servers = ["--server", f"127.0.0.1:{port}", f"localhost:{port}", "--token2wav-gpus", "2", "--llm-gpus", "1"]
    more = ["--num-requests", "4", "--warmup-requests", "1", "--concurrency", "1", "2", "--title", "A run"]
    assert benchmark.main([*servers, *more, "--output", str(tmp_path / "a")]) == 0
    tables = (tmp_path / "a.md").read_text()
    for title in ("Total Request Latency", "First Chunk Latency", "Playback", "Disaggregated Server"):
        assert f"#### {title}" in tables
    assert "| 2 | 2 | 1.33 |" in tables, "2 tasks on each of 2 servers with 2 GPUs, and 1 GPU for the LLM"
    sweep = json.loads((tmp_path / "a.json").read_text())
    assert [row["label"] for row in sweep["rows"]] == [2, 4] and all(row["errors"] == 0 for row in sweep["rows"])
    assert (tmp_path / "a.png").stat().st_size > 20_000


def test_open_loops_over_grpc_and_through_the_speech_service_get_as_much_audio(serve: Serve, tmp_path: Path) -> None:
    address, voices = serve(stack="dit").grpc_url, tmp_path / "voices"
    voices.mkdir()
    text = (
        "--target-text",
        "Hello there.",
        "--seed",
        "3",
        "--reference-audio",
        str(samples.FOLDER / "reference_en.wav"),
    )
    seconds = []
    with serving(Settings(urls=(address,), voices_dir=voices)) as url:
        for server in (address, url):
            more = ["--request-rates", "2", "4", "--num-requests", "2", "--output", str(tmp_path / "rates")]
            assert benchmark.main(["--server", server, *more, *text]) == 0
            assert "| Requests per Second | RTF |" in (tmp_path / "rates.md").read_text()
            rows = json.loads((tmp_path / "rates.json").read_text())["rows"]
            assert all(row["audible_ms"]["p50"] > 0 for row in rows)
            seconds.append([row["audio_seconds"] for row in rows])
    assert seconds[0] == seconds[1]
