"""The load generator against the real tritonserver with the demo checkpoint."""

import json
from pathlib import Path

import pytest
import soundfile
from cosyvoice_triton import samples
from cosyvoice_triton.cli import client_grpc

from tests.support.server_requests import STREAMS, Serve

pytestmark = pytest.mark.server


def test_concurrent_streams_are_all_answered_with_their_stages(serve: Serve, tmp_path: Path) -> None:
    host, port = serve().grpc_url.split(":")
    where = ["--server-addr", host, "--server-port", port, "--log-dir", str(tmp_path)]
    load = ["--num-tasks", str(STREAMS), "--num-requests", "12", "--warmup-requests", "2"]
    assert client_grpc.main([*where, *load, "--manifest-path", str(samples.MANIFEST)]) == 0
    result = json.loads((tmp_path / "summary.json").read_text())
    assert (result["requests"], result["errors"], result["unsent"], result["warmup_requests"]) == (12, 0, 0, 2)
    assert len(list(tmp_path.glob("*.wav"))) == 12
    assert result["audio_seconds"] == pytest.approx(
        sum(soundfile.info(path).duration for path in tmp_path.glob("*.wav"))
    )
    assert result["rtf"] == pytest.approx(result["processing_seconds"] / result["audio_seconds"])
    for stream in result["streams"]:
        assert set(stream["stages_ms"]) == {"voice", "llm", "prompt_cache", "tokens", "audio", "transport"}
        assert sum(stream["stages_ms"].values()) == pytest.approx(stream["arrivals_ms"][0], abs=0.1)
        assert min(stream["stages_ms"].values()) >= 0
    requests = {model["name"]: model["requests"] for model in result["models"]}
    assert requests["cosyvoice2_dit"] == 12 and requests["token2wav_dit"] > 24
    assert "model name is cosyvoice2_dit" in (tmp_path / "stats_summary-manifest.txt").read_text()
