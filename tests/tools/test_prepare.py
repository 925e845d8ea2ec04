"""Checkpoints downloaded from a fake hub, and the LLM's engine built by fakes of TensorRT-LLM's tools."""

import fnmatch
import io
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.cli import prepare, render, wait_ready
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.prepare import hub, steps
from cosyvoice_triton.runtimes import tensorrt
from cosyvoice_triton.voice import silent_tokens
from cosyvoice_triton.voice.files import read_spk2info

from tests.conftest import ROOT
from tests.support import tiny_onnx
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub

COSYVOICE2, STEP_AUDIO2 = stacks.UNET.repository, stacks.DIT.repository
SOURCE = hub.Download(COSYVOICE2, "CosyVoice2-0.5B", ("flow.pt", "CosyVoice-BlankEN/*"))
MODELSCOPE = hub.Download("iic/CosyVoice2-0.5B", SOURCE.directory, SOURCE.patterns, "modelscope")
BIG = os.urandom(24 << 20)  # the client of the hub writes 10 MiB at a time
FILES = {"flow.pt": BIG, "CosyVoice-BlankEN/config.json": b"{}", "README.md": b"not needed"}


def fetch(source: hub.Download, models: Path, revision: str | None = None) -> bool:
    (incomplete,) = hub.fetch((source,), models, {source.repository: revision} if revision else {})
    return incomplete


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(dict(FILES)) as running:
        for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
            monkeypatch.setenv(name, running.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield running


def test_existing_files_are_not_requested_again(remote: FakeHub, tmp_path: Path) -> None:
    assert fetch(SOURCE, tmp_path)
    assert not (tmp_path / "CosyVoice2-0.5B/README.md").exists()
    remote.requested.clear()
    assert not fetch(SOURCE, tmp_path, COMMIT)
    assert remote.requested == []
    (tmp_path / "CosyVoice2-0.5B/CosyVoice-BlankEN/config.json").unlink()
    assert fetch(SOURCE, tmp_path)
    assert not any(path.endswith("flow.pt") for path in remote.requested)


@pytest.mark.parametrize("source", [SOURCE, MODELSCOPE], ids=lambda source: source.hub)
def test_a_download_speaks_in_a_log_that_is_no_terminal(source, remote, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(hub, "LINE_SECONDS", 0)
    fetch(source, tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flow.pt: ")]
    assert lines[0].startswith("flow.pt: 0.00 of 25.2MB") and lines[-1].startswith("flow.pt: 25.2M of 25.2MB, ")
    assert len(lines) > 2


@pytest.mark.parametrize("hub_of", ["huggingface", "modelscope"])
@pytest.mark.parametrize("stack", stacks.BUILT_IN, ids=lambda stack: stack.name)
def test_what_is_downloaded_is_in_the_recorded_listings_of_the_hubs(stack: stacks.Stack, hub_of: hub.HubName) -> None:
    """Names and beginnings of checksums, with the day on which they were listed."""
    listings = json.loads(Path("tests/assets/hub_files.json").read_text())
    names = {"iic/CosyVoice2-0.5B": COSYVOICE2}  # ModelScope's
    found = hub.sources(stack, hub_of)
    assert len({source.repository for source in found}) == len(found)
    for source in found:
        files = listings[names.get(source.repository, source.repository)]["files"]
        assert all(fnmatch.filter(files, pattern) for pattern in source.patterns), source


def test_only_files_that_are_read_are_downloaded_and_the_llm_can_be_chosen(remote, tmp_path, capsys) -> None:
    stack = stacks.COSYVOICE3
    base = [f"{stack.llm.base}/{name}" for name in ("config.json", "merges.txt", "vocab.json")]
    read = {*base, *stack.files, "llm.rl.pt"}
    remote.files |= dict.fromkeys([*read, "llm.pt", f"{stack.llm.base}/model.safetensors"], b"{}")
    llm = tmp_path / stack.llm.directory
    llm.mkdir()
    (llm / "config.json").write_text('{"made_from": "llm.pt"}')
    command = ["download", str(tmp_path), "--stack", stack.name, "--rl"]
    assert prepare.main(command) == 1
    assert f"{llm} was made from llm.pt: remove it" in capsys.readouterr().err
    assert sum(path.startswith("/api/models/") for path in remote.requested) == 1  # a listing of each repository
    fetched = {file["name"] for file in hub.read_record(tmp_path)[stack.repository]["files"]}
    assert fetched == read
    (llm / "config.json").write_text('{"made_from": "llm.rl.pt"}')
    assert prepare.main(command) == 0
    voice = tmp_path / "voices" / f"{steps.VOICE}.wav"
    assert voice.stat().st_size > 0 and voice.with_suffix(".txt").read_text().startswith("Your call is now first")
    assert prepare.main(["download", str(tmp_path), "--stack", "unet", "--rl"]) == 1
    assert "the unet stack has one LLM only" in capsys.readouterr().err


def test_the_silent_tokens_of_a_checkpoint_are_found_once_and_kept(remote, tmp_path, monkeypatch, capsys) -> None:
    stack, folder = stacks.UNET, tmp_path / stacks.UNET.checkpoint
    remote.files |= {name: (TRAINED / stack.checkpoint / name).read_bytes() for name in stack.files}
    base = [f"{stack.llm.base}/{name}" for name in ("config.json", "vocab.json", "merges.txt")]
    remote.files |= dict.fromkeys([stack.llm.weights, *base], b"{}")
    (tmp_path / stack.llm.directory).mkdir()
    (tmp_path / stack.llm.directory / "config.json").write_text("{}")
    command = ["download", str(tmp_path), "--stack", stack.name]
    assert prepare.main(command) == 0
    kept = folder / silent_tokens.FILE
    assert f"{kept}: made, " in capsys.readouterr().out
    assert kept.read_bytes() == (TRAINED / stack.checkpoint / silent_tokens.FILE).read_bytes()
    monkeypatch.setattr(silent_tokens, "AudioTokenizer", None)  # nothing is tokenized again, also by the first start
    assert prepare.main(command) == 0 and f"{kept}: exists already, " in capsys.readouterr().out
    assert silent_tokens.silent_tokens(folder, stack) and {
        path.name for path in folder.iterdir() if path.is_file()
    } == {*stack.files, stack.llm.weights, silent_tokens.FILE}


def test_a_server_that_ignores_where_to_go_on_sends_the_whole_file(remote: FakeHub, tmp_path: Path) -> None:
    path = tmp_path / "flow.pt"
    path.with_name("flow.pt.part").write_bytes(b"begun")
    remote.continues = False
    hub.download(f"{remote.url}/any/resolve/{COMMIT}/flow.pt", path)
    assert path.read_bytes() == BIG


def test_a_damaged_file_is_removed_and_downloaded_by_the_next_run(remote: FakeHub, tmp_path: Path) -> None:
    for source in (SOURCE, MODELSCOPE):
        remote.damage.add("flow.pt")
        with pytest.raises(RuntimeError, match=r"flow.pt is damaged .* run again"):
            fetch(source, tmp_path)
        assert not (tmp_path / "CosyVoice2-0.5B/flow.pt").exists() and not (tmp_path / hub.RECORD).exists()
    remote.damage.clear()
    assert fetch(SOURCE, tmp_path)


@pytest.mark.parametrize("hub_of", ["huggingface", "modelscope"])
def test_an_interrupted_download_is_resumed_verified_and_recorded(hub_of: str, remote: FakeHub, tmp_path: Path) -> None:
    source, endpoint, commit = SOURCE, "HF_ENDPOINT", COMMIT
    if hub_of == "modelscope":
        source, endpoint, commit = MODELSCOPE, "MODELSCOPE_ENDPOINT", "master"
    remote.cut["flow.pt"] = 15 << 20
    try:  # the client of the HuggingFace hub may try again by itself
        fetch(source, tmp_path)
    except RuntimeError as error:
        assert "complete parts are kept: run again" in str(error) and endpoint in str(error)
        fetch(source, tmp_path)
    assert (tmp_path / "CosyVoice2-0.5B/flow.pt").read_bytes() == BIG
    assert any(int(header.removeprefix("bytes=").split("-")[0]) > 0 for header in remote.ranges)
    assert hub.read_record(tmp_path)[source.repository]["commit"] == commit
    remote.requested.clear()
    assert not fetch(source, tmp_path) and remote.requested == []


def test_a_file_outside_of_its_repository_is_refused(remote: FakeHub, tmp_path: Path) -> None:
    remote.files["CosyVoice-BlankEN/../../owned"] = b""
    with pytest.raises(RuntimeError, match="a file outside of itself"):
        fetch(MODELSCOPE, tmp_path)


def test_upstreams_speakers_are_downloaded_once_and_only_as_such_a_file(remote: FakeHub, tmp_path: Path) -> None:
    path = tmp_path / "spk2info.pt"
    content = io.BytesIO()
    torch.save({"001": {"embedding": torch.zeros(1, 192)}}, content)
    remote.files |= {"spk2info.pt": content.getvalue(), "page.html": b"<html>"}
    url = f"{remote.url}/any/resolve/{COMMIT}"
    with pytest.raises(ValueError, match="spk2info.pt"):
        steps.speakers(f"{url}/page.html", path)
    assert list(tmp_path.iterdir()) == []
    steps.speakers(f"{url}/spk2info.pt", path)
    assert list(read_spk2info(path)) == ["001"]
    remote.requested.clear()
    steps.speakers(f"{url}/spk2info.pt", path)
    assert remote.requested == [] and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="HTTP 404"):
        steps.speakers(f"{url}/none", tmp_path / "other.pt")


def test_a_full_disk_is_reported_before_any_download(remote, tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RuntimeError, match="1.1 GB are needed .* 0.0 GB are free"):
        fetch(SOURCE, tmp_path)
    assert not any("resolve" in path for path in remote.requested)


def test_a_missing_file_and_an_unreachable_hub_are_reported_in_one_line(remote, tmp_path, monkeypatch, capsys) -> None:
    del remote.files["flow.pt"]
    with pytest.raises(RuntimeError, match=f"at {COMMIT} has no flow.pt"):
        fetch(SOURCE, tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert prepare.main(["download", str(tmp_path)]) == 1
    error = capsys.readouterr().err.strip()
    assert "could not be downloaded" in error and "HF_ENDPOINT" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("status", [401, 403], ids=["private", "gated"])
def test_a_hub_that_wants_a_token_is_reported_before_anything_large_is_downloaded(
    remote: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """Also where only the second repository of a stack is private, or listed and not sent."""
    for pattern in (pattern for source in hub.sources(stacks.DIT) for pattern in source.patterns):
        remote.files[pattern.replace("*", "some")] = b"{}" if "*" in pattern else BIG
    remote.refuses[stacks.DIT.repository] = status
    assert prepare.main(["download", str(tmp_path)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert f"refuses {stacks.DIT.repository} (HTTP {status})" in line and "set HF_TOKEN" in line
    assert [path for path in tmp_path.rglob("*.pt") if path.stat().st_size] == []


def test_a_revision_for_an_unknown_repository_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_REVISIONS", f"{STEP_AUDIO2}=abc")
    assert steps.revisions() == {STEP_AUDIO2: "abc"}
    monkeypatch.setenv("CHECKPOINT_REVISIONS", "someone/else=abc")
    with pytest.raises(ValueError, match="someone/else=abc"):
        steps.revisions()


def test_a_second_preparation_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, said = list[str](), queue.Queue[str]()
    monkeypatch.setattr("builtins.print", lambda line, **_: said.put(line))

    def second() -> None:
        with steps.only_one(tmp_path):
            order.append("second")

    with steps.only_one(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        assert "another process is preparing" in said.get(timeout=60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


TOOL = """#!/bin/sh
for option; do
    case $option in --output_dir=*) mkdir -p "${option#*=}"; echo built >"${option#*=}/rank0.engine" ;; esac
done
echo "$0 $*" >>"$CALLS"
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of trtllm-build and of the Python interpreter with TensorRT-LLM; return the log of their calls."""
    (tmp_path / "bin").mkdir()
    for name in ("trtllm-build", "trtllm-python"):
        (tmp_path / "bin" / name).write_text(TOOL)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TRTLLM_PYTHON", str(tmp_path / "bin" / "trtllm-python"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_an_engine_is_built_once_and_again_for_other_options(tools: Path, tmp_path: Path) -> None:
    llm = tmp_path / "models" / "cosyvoice2_llm"
    llm.mkdir(parents=True)
    (llm / "config.json").write_text("{}")
    (llm / "model.safetensors").write_text("weights")
    arguments = ["engine", str(tmp_path / "models")]
    assert prepare.main(arguments) == 0
    assert (tmp_path / "models" / stacks.DEFAULT.llm.engine / "rank0.engine").exists()
    calls = tools.read_text()
    assert "--max_batch_size=64 --max_num_tokens=32768 --gemm_plugin=bfloat16" in calls
    built = [line for line in calls.splitlines() if "trtllm-build" in line]
    assert prepare.main(arguments) == 0
    assert [line for line in tools.read_text().splitlines() if "trtllm-build" in line] == built
    assert prepare.main([*arguments, "--tp-size", "2"]) == 0
    assert "--tp_size=2" in tools.read_text()
    shutil.copytree(llm, tmp_path / "models" / stacks.COSYVOICE3.llm.directory)
    assert prepare.main([*arguments, "--stack", "cosyvoice3"]) == 0
    assert (tmp_path / "models" / stacks.COSYVOICE3.llm.engine / "rank0.engine").exists()


def test_a_stack_without_plans_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(["plans", str(tmp_path), "--stack", "cosyvoice3"]) == 1
    assert "the flow of the cosyvoice3 stack runs in torch only" in capsys.readouterr().err


def test_without_a_checkpoint_the_error_names_the_command_that_downloads_it(tmp_path, capsys) -> None:
    download = "run: cosyvoice-triton prepare download"
    assert prepare.main(["engine", str(tmp_path)]) == 1
    assert download in capsys.readouterr().err
    for stack in ("dit", "unet"):
        assert prepare.main(["plans", str(tmp_path), "--stack", stack]) == 1
        assert f"flow.pt is missing; {download} {tmp_path} --stack {stack}" in capsys.readouterr().err
    for stack in stacks.names():
        assert render.main([str(tmp_path), str(tmp_path / "rendered"), "--stack", stack]) == 1
        assert f"{download} {tmp_path} --stack {stack}" in capsys.readouterr().err


def test_waiting_ends_when_the_awaited_process_ends(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:9/ready"
    with subprocess.Popen(["sleep", "1"]) as ending:
        assert wait_ready.main(["--process", str(ending.pid), url]) == 1
    assert f"process {ending.pid} has ended" in capsys.readouterr().err
    assert wait_ready.main(["--seconds", "0", url]) == 1 and "Connection refused" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        wait_ready.main(["localhost:8003/ready"])


def test_plans_are_built_from_existing_onnx_files_and_kept(tmp_path, capsys, monkeypatch) -> None:
    directory = tiny_onnx.write_stack(tmp_path / stacks.UNET.checkpoint, stacks.UNET)
    for printed in ("built ", "exists already"):
        assert prepare.main(["plans", str(tmp_path), "--stack", "unet", "--capability", "8.9"]) == 0
        out = capsys.readouterr().out
        assert out.count(printed) == 3
        assert f"cosyvoice-triton serve --models {tmp_path} --stack unet --speech-port" in out.splitlines()[-1]
    assert len(list((directory / "tensorrt").glob("*.plan"))) == 3
    assert prepare.main(["plans", str(tmp_path), "--stack", "unet", "--capability=9.0", "--precision=float32"]) == 1
    said = capsys.readouterr()
    assert "builds no plans for compute capability 9.0" in said.err and "float16" not in said.out
    with monkeypatch.context() as patched:
        patched.setattr(tensorrt, "installed", lambda: None)
        assert prepare.main(["plans", str(tmp_path), "--stack", "unet"]) == 1
    assert "TensorRT is not installed; run" in capsys.readouterr().err
    damaged = tmp_path / stacks.DIT.checkpoint / stacks.DIT.flow
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"")
    assert prepare.main(["plans", str(tmp_path), "--stack", "dit", "--capability", "8.9"]) == 1
    assert "not every network of" in capsys.readouterr().err


@pytest.mark.parametrize("packages", [("tensorrt", "tensorrt_bindings"), ()])
def test_the_images_tensorrt_is_linked_into_our_environment(tmp_path: Path, packages: tuple[str, ...]) -> None:
    """By the shell of Dockerfile.server."""
    (tmp_path / "ours").mkdir()
    for name in (*packages, "torch"):
        (tmp_path / "theirs" / name).mkdir(parents=True)
    for name, line in (("theirs.sh", f'PYTHONPATH=theirs exec {sys.executable} "$@"'), ("python3", "echo ours")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (shell,) = re.findall(r"theirs=.*?done$", (ROOT / "Dockerfile.server").read_text(), re.MULTILINE | re.DOTALL)
    environment = os.environ | {"TRTLLM_PYTHON": "./theirs.sh", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", shell], cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode == 0) == bool(packages), done.stderr
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(packages)


def test_sigterm_ends_a_preparation_with_the_hint_to_run_it_again(tmp_path: Path) -> None:
    """In a container it is process 1, which SIGTERM would not reach without a handler."""
    with steps.only_one(tmp_path):  # so that it waits
        command = [sys.executable, "-u", "-m", "cosyvoice_triton", "prepare", "download", str(tmp_path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
            assert process.stdout is not None and "waiting" in process.stdout.readline()
            process.terminate()
            _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and "run again to continue" in error
