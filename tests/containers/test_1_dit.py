"""docker-compose.dit.yml with deploy/compose/cpu.yml and its profiles: started, asked, broken, stopped."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from cosyvoice_triton.monitoring.metrics import LIVE, sum_of

from tests.containers.engine import Engine
from tests.containers.images import CPU
from tests.containers.project import LONG, Project, moment, wait_for
from tests.support.queries import OPERATE, SHOWN
from tests.support.serve_process import StreamResult

MODEL = "cosyvoice2_dit"
# Python, because the image has no pkill.
KILL_MODELS = """
import os, pathlib, signal
for name in pathlib.Path("/proc").glob("[0-9]*/comm"):
    if name.read_text().startswith("triton_python_b"):
        os.kill(int(name.parent.name), signal.SIGKILL)
"""
METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8003/metrics').read().decode())"
PREVIOUS = "cosyvoice-triton:previous"


def documented(word: str) -> str:
    """The commands of the page on operation with this word."""
    (commands,) = (block for block in re.findall(r"```\w*\n(.*?)```", OPERATE, re.DOTALL) if word in block)
    return str(commands)


UPGRADE = documented("--wait $service")


@pytest.fixture(scope="module")
def dit(docker: Engine, project: Callable[..., Project]) -> Iterator[Project]:
    docker.docker("tag", CPU, PREVIOUS)
    yield project("docker-compose.dit.yml", "deploy/compose/cpu.yml", CPU_IMAGE=PREVIOUS, SPEECH_API_KEYS="old")


def test_services_start_in_order_and_become_healthy(dit: Project) -> None:
    dit.up("download", "tts", "gateway", "speech")
    wait_for("the first start, until all are healthy", lambda: all(map(dit.healthy, ("tts", "gateway", "speech"))))
    download, tts, gateway = map(dit.container, ("download", "tts", "gateway"))
    assert download["State"]["ExitCode"] == 0
    assert moment(download, "FinishedAt") <= moment(tts, "StartedAt")
    # A tritonserver that aborts while it loads, as on a machine that is too busy, is started again later.
    assert moment(tts, "StartedAt") <= moment(gateway, "StartedAt") or tts["RestartCount"]
    assert not dit.exists("llm") and not dit.exists("engine")
    assert dit.execute("tts", "id", "-u").strip() == "1001"


def test_every_way_through_the_gateway_gives_speech(dit: Project) -> None:
    assert dit.get("/v2/health/ready")[0] == dit.get(f"/v2/models/{MODEL}/ready")[0] == 200
    assert dit.get("/v2/repository/index")[0] == 404
    answer = dit.spoken(MODEL)
    assert not answer.error and answer.samples > 10_000
    wait_for("the speech service knows a ready server", lambda: dit.get("/health", "SPEECH_PORT")[0] == 200, 60)
    status, audio = dit.say()
    assert status == 200 and audio[:4] == b"RIFF" and len(audio) > 20_000
    assert dit.say(voice="nobody")[0] in (400, 404)
    assert b"<html" in dit.get("/", "SPEECH_PORT")[1]
    assert dit.get("/ready", "HEALTH_PORT")[0] == 200


def live_during(dit: Project, commands: str, **settings: str) -> None:
    """Run commands while an answer is sent over gRPC and one, of a third, by the speech service, which has less time to
    stop; both end normally."""

    async def scene() -> tuple[StreamResult, tuple[int, bytes]]:
        answer = StreamResult()
        speaking = asyncio.create_task(dit.speak(MODEL, LONG, answer))
        await answer.begun.wait()
        saying = asyncio.create_task(asyncio.to_thread(dit.say, input=LONG[:180]))
        begun = re.compile(rb"^speech_live_streams 1", re.MULTILINE)
        await asyncio.to_thread(
            wait_for, "an answer by the speech service", lambda: begun.search(dit.get("/metrics", "SPEECH_PORT")[1])
        )
        await asyncio.to_thread(dit.operate, commands, **settings)
        return await speaking, await saying

    answer, (status, audio) = asyncio.run(scene())
    assert not answer.error and answer.samples > 200_000
    assert status == 200 and len(audio) > 130_000


def test_two_keys_are_valid_while_one_replaces_the_other(dit: Project) -> None:
    (command,) = set(re.findall(r"`(dc up .*--wait speech)`", OPERATE))
    for keys, known in (("old,new", ("old", "new")), ("new", ("new",))):
        live_during(dit, command, SPEECH_API_KEYS=keys)
        assert {key: dit.say(key)[0] for key in ("old", "new")} == {"old": 401, "new": 200} | dict.fromkeys(known, 200)


def test_voices_are_backed_up_and_restored(dit: Project, tmp_path: Path) -> None:
    backup, restore = documented("voices.tar.gz").replace("voices.tar.gz", str(tmp_path / "voices")).splitlines()
    dit.operate(backup)
    dit.execute("speech", "rm", "-r", "/models/voices")
    assert dit.say()[0] in (400, 404)
    dit.operate(restore)
    assert dit.say()[0] == 200


def test_an_upgrade_and_its_rollback_lose_no_stream(dit: Project) -> None:
    for image in (CPU, PREVIOUS):
        live_during(dit, UPGRADE, CPU_IMAGE=image)
        assert {dit.container(name)["Config"]["Image"] for name in ("tts", "speech")} == {image}
        assert not dit.spoken(MODEL).error and dit.say()[0] == 200


@pytest.mark.extended
def test_servers_that_start_later_are_on_the_gateways_list(dit: Project) -> None:
    for number, server in enumerate(("tts-2", "tts-3"), start=2):  # not both at once: this machine may have two cores
        dit.up(server, "redis", "prometheus")
        wait_for(f"{number} servers in the gateway's list", lambda number=number: dit.servers() == number)
    assert dit.execute("redis", "redis-cli", "ping").strip() == "PONG"


@pytest.mark.extended
def test_prometheus_scrapes_every_server_and_its_rules_load(dit: Project) -> None:
    def up() -> int:
        status, body = dit.get("/api/v1/query?query=sum(up)", "PROMETHEUS_PORT")
        result = json.loads(body)["data"]["result"] if status == 200 else []
        return int(result[0]["value"][1]) if result else 0

    wait_for("Prometheus sees 3 Tritons, their models, the speech service and the gateway", lambda: up() == 8)
    rules = json.loads(dit.get("/api/v1/rules", "PROMETHEUS_PORT")[1])["data"]["groups"]
    assert rules and all(rule["health"] != "err" for group in rules for rule in group["rules"])

    # Metrics have labels of what has been answered since the service's last start.
    assert dit.say()[0] == 200 and dit.say(voice="nobody")[0] in (400, 404)

    def empty() -> set[str]:
        """The queries without an answer, apart from those about a GPU."""
        answers = {query: dit.get(f"/api/v1/query?query={quote(query)}", "PROMETHEUS_PORT")[1] for query in SHOWN}
        return {query for query in SHOWN if not json.loads(answers[query])["data"]["result"] and "nv_gpu" not in query}

    with suppress(AssertionError):  # the next one names them
        wait_for("every query has an answer", lambda: not empty(), 120)
    assert empty() == set()


@pytest.mark.extended
def test_an_alert_reaches_its_receiver(docker: Engine, dit: Project) -> None:
    dit.up("alertmanager")
    server = ("sh", "-c", "exec python3 -um http.server 8080 2>&1")
    docker.docker("run", "--detach", "--name=receiver", "--network=speech_default", CPU, *server)
    amtool = ("amtool", "--alertmanager.url=http://127.0.0.1:9093", "alert", "add", "Example", "severity=page")
    wait_for("it takes an alert", lambda: "error" not in dit.execute("alertmanager", *amtool, check=False))
    wait_for("the alert is sent", lambda: "POST /pager" in docker.docker("logs", "receiver"))
    docker.docker("rm", "--force", "--volumes", "receiver")
    known = json.loads(dit.get("/api/v1/alertmanagers", "PROMETHEUS_PORT")[1])["data"]
    assert len(known["activeAlertmanagers"]) == 1


@pytest.mark.extended
def test_an_upgrade_of_several_servers_refuses_nobody(dit: Project) -> None:
    async def scene() -> list[StreamResult]:
        answers = []
        upgrade = asyncio.create_task(
            asyncio.to_thread(dit.operate, UPGRADE.replace("in tts speech", "in tts tts-2 tts-3"), CPU_IMAGE=CPU)
        )
        while not upgrade.done():
            answers += await asyncio.gather(*(dit.speak(MODEL, f"Number {n}.", StreamResult()) for n in range(3)))
        await upgrade
        return answers

    answers = asyncio.run(scene())
    assert len(answers) > 3 and [answer.error for answer in answers if answer.error] == []
    wait_for("all serve", lambda: dit.servers() == 3)
    assert {dit.container(name)["Config"]["Image"] for name in ("tts", "tts-2", "tts-3")} == {CPU}


@pytest.mark.extended
def test_a_dead_model_ends_only_its_own_streams_and_its_container_starts_again(dit: Project) -> None:
    def live(server: str) -> float:
        return sum_of(dit.execute(server, "python3", "-c", METRICS), LIVE.name)

    async def scene() -> tuple[list[StreamResult], str, float]:
        answers, speaking = [StreamResult() for _ in range(4)], []
        for answer in answers:  # not at once: the fourth of a voice gets another server once Envoy has counted three
            speaking.append(asyncio.create_task(dit.speak(MODEL, 3 * LONG, answer)))
            await answer.begun.wait()
        server = await asyncio.to_thread(max, restarts, key=live)
        await asyncio.to_thread(dit.execute, server, "python3", "-c", KILL_MODELS)
        noticed = await asyncio.to_thread(wait_for, "the dead server is off the list", lambda: dit.servers() == 2, 60)
        late = await dit.speak(MODEL, "Hello.", StreamResult())
        assert not late.error
        return await asyncio.gather(*speaking), server, noticed

    restarts = {server: dit.container(server)["RestartCount"] for server in ("tts", "tts-2", "tts-3")}
    answers, server, noticed = asyncio.run(scene())
    assert 0 < sum(bool(answer.error) for answer in answers) < 4 and noticed < 20, answers
    wait_for("it has started again", lambda: dit.servers() == 3)
    assert dit.container(server)["RestartCount"] > restarts[server]


@pytest.mark.extended
def test_missing_names_do_not_delay_the_gateway(dit: Project) -> None:
    dit.compose("stop", "tts-3")
    dit.compose("rm", "--force", "tts-3")  # its name does not resolve anymore
    wait_for("two servers are left", lambda: dit.servers() == 2, 60)
    dit.compose("kill", "tts-2")
    assert wait_for("a killed server is noticed although names are missing", lambda: dit.servers() == 1, 60) < 20


def test_a_stopped_server_finishes_its_streams(dit: Project) -> None:
    live_during(dit, "dc stop tts")
    assert dit.container("tts")["State"]["ExitCode"] == 0
    wait_for("nothing is ready", lambda: dit.servers() == 0, 60)
    refused = str(dit.spoken(MODEL).error)
    assert "no speech server is ready" in refused or "retry" in refused  # grpc.aio may lose the reason
    assert dit.get("/v2/health/ready")[0] == dit.say()[0] == 503
