"""The load generator against the real tritonserver with the demo checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
from cosyvoice_triton import samples
from cosyvoice_triton.bench import load as bench_load
from cosyvoice_triton.cli import client_grpc
from cosyvoice_triton.speech_service.settings import Settings

from tests.support.speech_fixtures import serving

pytestmark = pytest.mark.server

Serve = Callable[..., Any]
VOICE = samples.FOLDER / "reference_en.wav"


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


def test_every_door_leads_to_as_much_audio(serve: Serve, demo_models: Path, tmp_path: Path) -> None:
    address, voices, output = serve(stack="dit").grpc_url, tmp_path / "voices", tmp_path / "rates"
    voices.mkdir()
    said = ["--target-text", "Hello there.", "--seed", "3", "--reference-audio", str(VOICE), "--num-requests", "2"]
    seconds = {}
    with serving(Settings(urls=(address,), voices_dir=voices)) as url:
        for door in (address, url, url.replace("http", "ws"), str(demo_models)):
            loop = ["--concurrency", "1", "--parameter", "ras_window=0", "--output", str(output)]
            assert bench_load.main(["--server", door, *loop, *said]) == 0
            (row,) = json.loads(output.with_suffix(".json").read_text())["rows"]
            assert row["audible_ms"]["p50"] > 0 and row["errors"] == 0
            seconds[door] = row["audio_seconds"]
    assert len(set(seconds.values())) == 1, seconds
