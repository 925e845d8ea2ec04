"""The documents' own commands, typed as they stand: what `fill_template.py` makes of the templates is a stack."""

import shutil
from pathlib import Path

import yaml
from cosyvoice_triton.cli import fill_template
from cosyvoice_triton.server.rendering import TEMPLATES, parse

from tests.conftest import ROOT
from tests.support.server_requests import read_settings

UPSTREAM = yaml.safe_load((ROOT / "tests/assets/upstream_templates.yaml").read_text())
# Stack -> template -> upstream's substitutions.
COMMANDS = {stack: {name: ",".join(pairs) for name, pairs in of.items()} for stack, of in UPSTREAM.items()}


def fill(commands: dict[str, str], repository: Path) -> None:
    """Copy the templates to `repository` and fill them in."""
    for template, substitutions in commands.items():
        name = Path(template).name
        shutil.copytree(TEMPLATES / template, repository / name, dirs_exist_ok=True)
        assert fill_template.main(["-i", str(repository / name / "config.pbtxt"), substitutions]) == 0


def parameters_of(repository: Path, model: str) -> dict[str, str]:
    """The parameters of a filled template, which its model reads without an error."""
    config = parse((repository / model / "config.pbtxt").read_text(), model)
    read_settings(config)
    return {key: value.string_value for key, value in config.parameters.items()}


def test_the_filled_orchestrators_know_the_llm_of_their_deployment(tmp_path: Path) -> None:
    """DiT: trtllm-serve at its default port, which names the model after its directory. UNet: the C++ backend."""
    fill(COMMANDS["dit"], tmp_path)
    dit = parameters_of(tmp_path, "cosyvoice2_dit")
    assert (dit["llm_transport"], dit["llm_urls"]) == ("openai", "http://localhost:8000/v1")
    assert dit["llm_model"] == "trt_engines_bfloat16"
    fill(COMMANDS["unet"], tmp_path)
    unet = parameters_of(tmp_path, "cosyvoice2")
    assert (unet["llm_transport"], unet["llm_backend"], unet["llm_model"]) == ("triton", "tensorrtllm", "tensorrt_llm")
    for template in (*COMMANDS["dit"], *COMMANDS["unet"]):
        assert parameters_of(tmp_path, Path(template).name)


def test_the_llm_streams_also_where_the_commands_say_offline(tmp_path, capsys) -> None:
    name = "model_repo/tensorrt_llm"
    fill({name: COMMANDS["unet"][name].replace("decoupled_mode:True", "decoupled_mode:False")}, tmp_path)
    config = parse((tmp_path / "tensorrt_llm" / "config.pbtxt").read_text(), "tensorrt_llm")
    assert config.model_transaction_policy.decoupled
    assert "decoupled_mode:False has no effect" in capsys.readouterr().err
