"""fill_template, its error messages, and what it makes of the templates by the documents' own commands."""

import shutil
from pathlib import Path

import pytest
import yaml
from cosyvoice_triton.cli import fill_template
from cosyvoice_triton.cli.fill_template import main, parse_substitutions
from cosyvoice_triton.server.rendering import TEMPLATES, parse

from tests.conftest import ROOT
from tests.support.server_requests import read_settings

ORCHESTRATOR = (
    "model_dir:/m,bls_instance_num:4,llm_tokenizer_dir:/t,triton_max_batch_size:16,decoupled_mode:False,"
    "max_queue_delay_microseconds:0"
)


@pytest.fixture
def template(tmp_path) -> Path:
    return Path(shutil.copy(TEMPLATES / "model_repo" / "cosyvoice2" / "config.pbtxt", tmp_path))


def test_without_in_place_the_result_is_printed_and_the_file_kept(template, capsys):
    before = template.read_text()
    assert main([str(template), ORCHESTRATOR]) == 0
    assert parse(capsys.readouterr().out, "cosyvoice2").instance_group[0].count == 4
    assert template.read_text() == before


def test_a_value_may_contain_colons_and_escaped_commas():
    assert parse_substitutions(r"llm_urls:http://a:8000/v1\,http://b:1,model_dir:C\:/m") == {
        "llm_urls": "http://a:8000/v1,http://b:1",
        "model_dir": "C:/m",
    }


def test_urls_reach_the_parameter(template):
    assert main(["-i", str(template), ORCHESTRATOR + r",llm_transport:openai,llm_urls:http://a:8000/v1\,http://b"]) == 0
    config = parse(template.read_text(), "cosyvoice2")
    assert config.parameters["llm_urls"].string_value == "http://a:8000/v1,http://b"


@pytest.mark.parametrize(
    ("substitutions", "message"),
    [
        (ORCHESTRATOR + ",name:x", "unknown key 'name'"),
        ("model_dir:/m", "no value for 'triton_max_batch_size'"),
        (ORCHESTRATOR + ",llm_urls:http://a,b", r"'b' is not key:value; a comma within a value is written as \,"),
        (ORCHESTRATOR + ",model_dir:/n", "key 'model_dir' is given twice"),
        (ORCHESTRATOR + ',llm_model:a"b', "the value of 'llm_model' must not contain"),
    ],
)
def test_a_mistake_is_reported_and_the_file_kept(template, capsys, substitutions, message):
    before = template.read_text()
    assert main(["-i", str(template), substitutions]) == 1
    reported = capsys.readouterr().err
    assert message in reported and str(template) in reported
    assert template.read_text() == before


def test_a_template_of_a_model_that_no_stack_has_can_be_filled(template):
    template.write_text('name: "mine"\nmax_batch_size: ${size}\ninstance_group [{ kind: ${instance_kind} }]\n')
    assert main(["-i", str(template), "size:4"]) == 0
    config = parse(template.read_text(), "mine")
    assert (config.max_batch_size, config.instance_group[0].kind) == (4, config.instance_group[0].KIND_AUTO)


def test_a_filled_file_is_not_filled_twice(template, capsys):
    assert main(["-i", str(template), ORCHESTRATOR]) == 0
    assert main(["-i", str(template), ORCHESTRATOR]) == 1
    assert "it was filled before" in capsys.readouterr().err


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
