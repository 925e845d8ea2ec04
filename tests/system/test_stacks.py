"""A stack is data: one registered by another package is rendered, listed and found without changes to other code."""

import argparse
import asyncio
import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import cli, stacks
from cosyvoice_triton.cli import fill_template, render
from cosyvoice_triton.client.arguments import add_request_arguments
from cosyvoice_triton.client.failures import not_served
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.prepare import hub, steps
from cosyvoice_triton.runtimes.signatures import workloads
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.rendering import MARKER, TEMPLATES, parse, placeholders, templates_of
from cosyvoice_triton.speech_service.triton import TritonPool
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision

from tests.conftest import ROOT, load_model
from tests.support.server_requests import read_settings
from tests.support.speech_fixtures import stub_triton
from tests.support.triton_stub import TritonStub

BUILT_IN = [stack.name for stack in stacks.BUILT_IN]

# The module of an external package.
PACKAGE = """
from pathlib import Path

from cosyvoice_triton.stacks import SpeechLLM, Stack

THIRD = Stack(
    name="third",
    summary="a made-up flow",
    orchestrator="speech3",
    token2wav="sound3",
    templates=str(Path(__file__).parent / "templates"),
    llm=SpeechLLM(
        repository="them/Third", download="Third", weights="llm.rl.pt", base="Blank", directory="third_llm",
        genai="third_llm_genai", engine="third_engine",
    ),
    repository="them/Third",
    download="Third",
    speech_tokenizer="speech_tokenizer_v3.onnx",
    flow_tensors="decoder.estimator.third_blocks.",
    flow_config="cosyvoice_triton.networks.flow.config:UNetFlowConfig",
    networks={"whole": "third.onnx", "streaming": "third.streaming.onnx"},
    cumulative=True,
    chunk_boundary=5,
    loader="third_stack:load",
    settings={"sampling": "triton", "max_streams": "7"},
)


def load(path, options):
    from cosyvoice_triton.token2wav.flow import unet_flow

    return unet_flow.load(path, options)
"""


@pytest.fixture
def third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A third stack from a package outside the checkout, with its own templates, registered for one test."""
    package = tmp_path / "package"
    for model, new in ((stacks.DIT.orchestrator, "speech3"), (stacks.DIT.token2wav, "sound3")):
        copy = package / "templates" / new
        shutil.copytree(TEMPLATES / stacks.DIT.templates / model, copy, ignore=shutil.ignore_patterns("__pycache__"))
        config = copy / "config.pbtxt"
        config.write_text(config.read_text().replace(f'name: "{model}"', f'name: "{new}"'))
        own = (copy / "1" / "model.py").read_text().replace("stacks.DIT", "THIRD")
        (copy / "1" / "model.py").write_text("from third_stack import THIRD\n" + own)
    (package / "third_stack.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(package)
    stack: Stack = importlib.import_module("third_stack").THIRD
    stacks.register(stack)
    yield stack
    stacks.unregister(stack.name)
    del sys.modules["third_stack"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The files of the third stack's checkpoints that rendering checks for."""
    directory = tmp_path / "models"
    for name in ("flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v3.onnx"):
        (directory / "Third").mkdir(parents=True, exist_ok=True)
        (directory / "Third" / name).touch()
    for name in ("third_llm/tokenizer_config.json", "third_llm_genai/model.onnx"):
        (directory / name).parent.mkdir(parents=True)
        (directory / name).touch()
    return directory


def test_a_stack_of_another_package_is_rendered_and_valid(third, models, tmp_path, capsys) -> None:
    command = [str(models), str(tmp_path / "out"), "--stack", "third", "--device", "cpu"]
    assert render.main([*command, "--set", "max_streams=3", "--set", "first_hop_tokens=10"]) == 0
    assert "settings given: max_streams=3 first_hop_tokens=10;" in capsys.readouterr().out
    assert render.main(command) == 0, "an earlier rendering is replaced, its settings included"
    assert "settings given: none;" in capsys.readouterr().out
    configs = {}
    for directory in (path for path in (tmp_path / "out").iterdir() if path.is_dir()):
        text = (directory / "config.pbtxt").read_text()
        assert not placeholders(text)
        configs[directory.name] = parse(text, directory.name)  # by Triton's own model_config_pb2
        read_settings(configs[directory.name])
    assert configs.keys() == {"audio_tokenizer", "speaker_embedding", "tensorrt_llm", "sound3", "speech3"}
    parameters = {
        model: {key: value.string_value for key, value in config.parameters.items()}
        for model, config in configs.items()
    }
    directories = [values["model_dir"] for model, values in parameters.items() if model != "tensorrt_llm"]
    assert directories == [str(models / "Third")] * 4
    assert parameters["speech3"]["llm_tokenizer_dir"] == str(models / "third_llm")
    assert parameters["tensorrt_llm"]["gpt_model_path"] == str(models / "third_llm_genai")
    assert json.loads((tmp_path / "out" / MARKER).read_text())["stack"] == "third"
    # The stack's own defaults, in the models that have the setting.
    assert parameters["speech3"]["sampling"] == "triton" and "max_streams" not in parameters["speech3"]
    assert parameters["sound3"]["max_streams"] == "7" and "sampling" not in parameters["sound3"]
    assert "stack = THIRD" in (tmp_path / "out" / "speech3" / "1" / "model.py").read_text()


def test_its_template_of_a_shared_model_replaces_the_default_one_and_fill_template_fills_it(third, models, capsys):
    own, shared = Path(third.templates), TEMPLATES / stacks.SHARED_TEMPLATES
    shutil.copytree(shared / "audio_tokenizer", own / "audio_tokenizer")
    found = templates_of(StackOptions(models_dir=models, stack="third"))
    assert (found["audio_tokenizer"].parent, found["speaker_embedding"].parent) == (own, shared)
    given = "model_dir:/m,triton_max_batch_size:16,max_queue_delay_microseconds:0"
    assert fill_template.main([str(own / "sound3" / "config.pbtxt"), given]) == 0
    assert parse(capsys.readouterr().out, "sound3").parameters["max_streams"].string_value == "7"


def test_its_networks_are_loaded_by_its_own_loader(third: Stack) -> None:
    options = {"device": "cpu", "limits": BatchLimits(max_streams=1, chunk_boundary=third.chunk_boundary)}
    precision = Precision(torch.float32, torch.float32)
    engine = Token2Wav.load(third, TRAINED / stacks.UNET.checkpoint, precision=precision, **options)
    engine.warm_up()
    model = load_model(Path(third.templates) / "sound3" / "1" / "model.py").TritonPythonModel
    assert model.stack is third


@pytest.mark.parametrize("command", ["render", "demo", "serve", "voice add", "prepare download"])
def test_every_command_with_stacks_lists_it(command: str, third: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    assert f"--stack {{{','.join(BUILT_IN)},third}}" in capsys.readouterr().out


def test_clients_and_the_speech_service_find_its_model(third: Stack) -> None:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser)
    models = [stack.orchestrator for stack in stacks.BUILT_IN]
    assert " or ".join([f"{models[0]} (default)", *models[1:], "speech3"]) in " ".join(parser.format_help().split())
    assert parser.parse_args([]).model_name == "cosyvoice2_dit"
    assert "`cosyvoice-triton serve --stack third`" in str(not_served("localhost:8001", "unknown"))

    async def served(address: str) -> list[str]:
        async with TritonPool.of((address,)) as pool:
            with pool.lease("") as (_, name):
                return [*pool.models, name]

    with stub_triton(TritonStub(model="speech3")) as address:
        assert asyncio.run(served(address)) == ["speech3", "speech3"]


def test_its_files_are_downloaded_and_recognised(third: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    files = "llm.rl.pt Blank/*.json Blank/*.txt flow.pt hift.pt campplus.onnx speech_tokenizer_v3.onnx"
    assert hub.sources(third) == (hub.Download("them/Third", "Third", tuple(files.split())),)
    monkeypatch.setenv("CHECKPOINT_REVISIONS", "them/Third=abc")
    assert steps.revisions() == {"them/Third": "abc"}
    assert stacks.of_flow(["x", "decoder.estimator.third_blocks.0.attn"], "flow.pt") is third
    found = {workload.use: workload.onnx for workload in workloads(third, "float16")}
    assert found == {"whole": "third.onnx", "streaming": "third.streaming.onnx", "speaker": "campplus.onnx"}


def test_names_of_another_stack_cannot_be_registered(third: Stack) -> None:
    with pytest.raises(ValueError, match="stack 'third': sound3, speech3, third belongs to the stack 'third'"):
        stacks.register(third)
    with pytest.raises(ValueError, match=f"no stack 'fourth'; there are {', '.join(BUILT_IN)}, third"):
        stacks.named("fourth")
    with pytest.raises(ValueError, match="no stack has the model 'sound4'; there are .*, sound3, speech3"):
        stacks.of_model("sound4")
    assert stacks.of_model("sound3") is third


@pytest.mark.parametrize("stack", stacks.BUILT_IN, ids=lambda stack: stack.name)
def test_a_stack_is_in_the_wheel_and_the_images_and_passes_the_gateway(stack: Stack) -> None:
    assert (ROOT / "common" / "cosyvoice_triton" / "templates" / stack.templates).is_dir()
    assert f"COPY {stack.templates} {stack.templates}\n" in (ROOT / "Dockerfile.server").read_text()
    assert f"!{stack.templates}\n" in (ROOT / ".dockerignore").read_text()
    patterns = re.findall(r"regex: (/v2\S+)", (ROOT / "deploy" / "envoy" / "envoy.yaml").read_text())
    for path in ("ready", "config", "infer"):
        assert any(re.fullmatch(pattern, f"/v2/models/{stack.orchestrator}/{path}") for pattern in patterns)
