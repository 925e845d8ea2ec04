"""Templates and rendered stacks, parsed like Triton parses them; fill_template, its error messages, and what it makes
of the templates by the documents' own commands."""

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from cosyvoice_triton import stacks
from cosyvoice_triton.cli import fill_template
from cosyvoice_triton.cli.fill_template import main
from cosyvoice_triton.config import SPARE_REQUESTS, Token2WavConfig
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.llm.triton_client import request_tensors
from cosyvoice_triton.server import rendering
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.rendering import (
    TEMPLATES,
    defaults,
    fill,
    parse,
    placeholders,
    render,
    settings_of,
    templates_of,
)

from tests.conftest import ROOT
from tests.support.server_requests import read_settings as read

CONFIGS = sorted(TEMPLATES.glob("model_repo*/*/config.pbtxt"))
PROMPT_MODELS = ("audio_tokenizer", "speaker_embedding")
STACKS = [(stack, transport) for stack in stacks.names() for transport in ("triton", "openai")]


def options(tmp_path: Path, **changes) -> StackOptions:
    return StackOptions(models_dir=tmp_path / "models", **changes)


def configs_of(tmp_path: Path, **changes) -> dict:
    """The filled templates by model, parsed as Triton does."""
    return {name: parse(text, name) for name, text in rendering.filled_configs(options(tmp_path, **changes)).items()}


def written(repository: Path, name: str):
    return parse((repository / name / "config.pbtxt").read_text(), name)


@pytest.mark.parametrize(("stack", "transport"), STACKS)
def test_a_rendered_stack_parses_leaves_no_placeholder_and_configures_as_in_this_process(tmp_path, stack, transport):
    urls = ("http://a:8000/v1",) if transport == "openai" else ()
    how = {"llm_transport": transport, "llm_urls": urls, "device": "cpu"}
    wanted = options(tmp_path, stack=stack, settings={"max_streams": "3", "first_hop_tokens": "25"}, **how)
    render(wanted, tmp_path / "out")
    models = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert models == set(templates_of(wanted))
    for name in models:
        assert "${" not in (tmp_path / "out" / name / "config.pbtxt").read_text()
        assert written(tmp_path / "out", name).max_batch_size >= 1
        assert (tmp_path / "out" / name / "1" / "model.py").exists()
        rendered = read(written(tmp_path / "out", name))
        own = {"decoupled": False} if hasattr(rendered, "decoupled") else {}  # follows from Triton's policy
        if name not in PROMPT_MODELS:
            assert dataclasses.replace(rendered, **own) == wanted.config(settings_of(name))
    with pytest.raises(ValueError, match="unknown setting 'max_stream'"):
        options(tmp_path, settings={"max_stream": "3"}).config(Token2WavConfig)


EMPTY = {"guided_decoding_backend", "xgrammar_tokenizer_info_path"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_a_template_takes_every_setting_of_its_model_with_its_default_and_declares_no_other(path):
    name = path.parent.name
    template = path.read_text()
    own = {"triton_backend": "python", "instance_kind": "KIND_CPU", "decoupled_mode": "true"}
    types = {"encoder_input_features_data_type": "TYPE_FP16", "logits_datatype": "TYPE_FP32"}
    values = {key: (own | types).get(key, "1") for key in placeholders(template)}
    settings = settings_of(name)
    values |= dict.fromkeys(settings.parameters().keys() - set(re.findall(r'key: "(\w+)"', template)), "1")
    config = parse(fill(template, values), name)
    assert set(config.parameters) == settings.parameters().keys() | settings.foreign_parameters
    assert all(parameter.string_value != "" or key in EMPTY for key, parameter in config.parameters.items())
    of_stack = next(({**each.settings, **each.upstream} for each in stacks.BUILT_IN if name in each.models), {})
    for key, field in settings.parameters().items():
        if field.name in defaults(name):
            assert of_stack.get(key, rendering.format_setting(field.default)) == defaults(name)[field.name], key


@pytest.mark.parametrize("stack", stacks.BUILT_IN, ids=lambda stack: stack.name)
def test_token2wav_is_one_process_wherever_it_computes_and_prompt_models_can_be_on_the_cpu(stack, tmp_path):
    """Its streams are in that process, so Triton must neither start a second one nor insist on correlation ids."""
    configs = configs_of(tmp_path, stack=stack.name, device="gpu", settings={"prompt_device": "cpu", "llm_gpu": "0"})
    config = configs[stack.token2wav]
    (group,) = config.instance_group
    assert (group.kind, group.count) == (group.KIND_CPU, 1)
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert (read(config).device, read(config).prompt_device) == ("cuda:0", "cpu")  # the latter to plan the memory
    for name in PROMPT_MODELS:
        (group,) = configs[name].instance_group
        assert (group.kind, list(group.gpus)) == (group.KIND_CPU, [])  # with GPUs Triton would refuse it
    on_cpu = configs_of(tmp_path, stack=stack.name, device="cpu", settings={"token2wav_gpus": "0 1"})
    assert list(on_cpu["audio_tokenizer"].instance_group[0].gpus) == []


def test_the_llm_accepts_a_few_requests_more_than_token2wav_has_streams_and_both_know_its_memory(tmp_path):
    streams = int(defaults("token2wav")["max_streams"])
    assert int(defaults("tensorrt_llm")["max_requests"]) == streams + SPARE_REQUESTS

    def filled(**given):
        configs = configs_of(tmp_path, stack="dit", settings=given)
        return read(configs["tensorrt_llm"]), read(configs["token2wav_dit"])

    llm, token2wav = filled(max_requests="5")
    assert (llm.max_requests, token2wav.max_streams) == (5, streams)
    llm, token2wav = filled(max_streams="7", gpu_memory_gib="8", llm_memory_gib="2.5")
    assert (llm.max_requests, token2wav.max_streams) == (7 + SPARE_REQUESTS, 7)
    assert llm.llm_memory_gib == token2wav.llm_memory_gib == 2.5 and token2wav.gpu_memory_gib == 8


# Parameters without which the C++ backend does not load, of TensorRT-LLM 0.20; it has defaults for all others.
CPP_REQUIRED = {"gpt_model_type", "tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend"}


@pytest.mark.parametrize("stack", stacks.names())
def test_the_llm_renders_for_the_cpp_backend(tmp_path, stack):
    configs = configs_of(tmp_path, stack=stack, llm_backend="tensorrtllm")
    config = configs["tensorrt_llm"]
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert config.backend == "tensorrtllm"
    assert parameters["gpt_model_path"] == str(tmp_path / "models" / stacks.named(stack).llm.engine)
    assert parameters["gpt_model_type"] == "inflight_fused_batching"
    assert (parameters["kv_cache_free_gpu_mem_fraction"], parameters["max_tokens_in_paged_kv_cache"]) == ("0.5", "")
    assert CPP_REQUIRED <= parameters.keys()
    sent = request_tensors(np.array([1]), Sampling(), 2).keys() | {"embedding_bias", "stop"}
    assert sent <= {tensor.name for tensor in config.input}
    required = {tensor.name for tensor in config.input if not tensor.optional}
    assert required == {"input_ids", "input_lengths", "request_output_len"}
    assert read(configs[stacks.named(stack).orchestrator]).llm_backend == "tensorrtllm"


@pytest.mark.parametrize(
    ("engine", "device", "installed", "directory"),
    [
        ("auto", "auto", False, "cosyvoice2_llm_genai"),
        ("auto", "auto", True, "cosyvoice2_llm"),
        ("auto", "cpu", True, "cosyvoice2_llm_genai"),
        ("vllm", "gpu", False, "cosyvoice2_llm"),
        ("cuda", "cpu", False, "cosyvoice2_llm"),
        ("onnxruntime_genai", "gpu", True, "cosyvoice2_llm_genai"),
    ],
)
def test_each_engine_gets_the_directory_that_it_loads(tmp_path, monkeypatch, engine, device, installed, directory):
    monkeypatch.setattr(
        "cosyvoice_triton.server.options.reads_huggingface", lambda kind: installed and kind != "KIND_CPU"
    )
    assert options(tmp_path, llm_engine=engine, device=device).engine_dir.name == directory


def test_prompt_models_use_the_response_cache_and_the_llm_streams_also_where_a_stack_does_not(tmp_path):
    configs = configs_of(tmp_path, stack="unet", decoupled=False)
    assert all(configs[name].response_cache.enable for name in PROMPT_MODELS)
    decoupled = {name: config.model_transaction_policy.decoupled for name, config in configs.items()}
    assert decoupled["tensorrt_llm"] and not decoupled["cosyvoice2"]


def test_an_earlier_rendering_is_replaced_and_no_other_content(tmp_path):
    render(options(tmp_path, stack="unet"), tmp_path / "out")
    render(options(tmp_path, stack="dit"), tmp_path / "out")
    assert not (tmp_path / "out" / "cosyvoice2").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not empty and not an earlier rendering"):
        render(options(tmp_path), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_failed_rendering_leaves_nothing(tmp_path):
    for settings, message in (
        ({"colour": "red"}, "unknown setting 'colour'"),
        ({"max_streams": "-1"}, "'max_streams' must be above 0, not -1"),
        ({"max_queue_delay_microseconds": "many"}, "not a valid config.pbtxt"),
    ):
        with pytest.raises(ValueError, match=message):
            render(options(tmp_path, settings=settings), tmp_path / "out")
    for gpus in ("", "0 0", "-1", "0,1,0"):
        with pytest.raises(ValueError, match="token2wav_gpus"):
            options(tmp_path, settings={"token2wav_gpus": gpus})
    with pytest.raises(ValueError, match="needs llm_urls"):
        options(tmp_path, llm_transport="openai")
    assert list(tmp_path.iterdir()) == []


def test_every_missing_file_of_a_checkpoint_is_listed(tmp_path):
    missing = [path.name for path in options(tmp_path, stack="unet").missing_files()]
    assert missing == [
        *("flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v2.onnx"),
        *("tokenizer_config.json", "cosyvoice2_llm_genai"),
    ]


@pytest.mark.parametrize("stack", stacks.names())
def test_each_gpu_of_token2wav_has_a_model_of_its_own(stack, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    given = {"token2wav_gpus": "0,3", "max_streams": "5", "llm_gpu": "3", "llm_memory_gib": "2.5"}
    wanted = options(tmp_path, stack=stack, device="gpu", settings=given)
    render(wanted, tmp_path / "out")
    first = stacks.named(stack).token2wav
    configs = {name: written(tmp_path / "out", name) for name in (*templates_of(wanted), f"{first}_1")}
    assert (tmp_path / "out" / f"{first}_1" / "1" / "model.py").exists()
    token2wav = [read(configs[name]) for name in (first, f"{first}_1")]
    assert [(each.device, each.llm_share_gib) for each in token2wav] == [("cuda:0", 0), ("cuda:3", 2.5)]
    llm = read(configs["tensorrt_llm"])
    assert (llm.llm_gpu, llm.max_requests) == (3, 2 * 5 + SPARE_REQUESTS)
    assert all(list(configs[name].instance_group[0].gpus) == [3] for name in PROMPT_MODELS)
    assert read(configs[wanted.orchestrator]).token2wav_gpus == (0, 3)


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


def test_a_value_may_contain_colons_and_escaped_commas_and_a_filled_file_is_not_filled_twice(template, capsys):
    urls = r",llm_transport:openai,llm_urls:http://a:8000/v1\,http://b"
    given = ORCHESTRATOR.replace("model_dir:/m", r"model_dir:C\:/m") + urls
    assert main(["-i", str(template), given]) == 0
    parameters = parse(template.read_text(), "cosyvoice2").parameters
    assert parameters["llm_urls"].string_value == "http://a:8000/v1,http://b"
    assert parameters["model_dir"].string_value == "C:/m"
    assert main(["-i", str(template), given]) == 1
    assert "it was filled before" in capsys.readouterr().err


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


UPSTREAM = yaml.safe_load((ROOT / "tests/assets/upstream_templates.yaml").read_text())
# Stack -> template -> upstream's substitutions.
COMMANDS = {stack: {name: ",".join(pairs) for name, pairs in of.items()} for stack, of in UPSTREAM.items()}


def fill_all(commands: dict[str, str], repository: Path) -> None:
    """Copy the templates to `repository` and fill them in."""
    for template, substitutions in commands.items():
        name = Path(template).name
        shutil.copytree(TEMPLATES / template, repository / name, dirs_exist_ok=True)
        assert fill_template.main(["-i", str(repository / name / "config.pbtxt"), substitutions]) == 0


def parameters_of(repository: Path, model: str) -> dict[str, str]:
    """The parameters of a filled template, which its model reads without an error."""
    config = parse((repository / model / "config.pbtxt").read_text(), model)
    read(config)
    return {key: value.string_value for key, value in config.parameters.items()}


def test_the_filled_orchestrators_know_the_llm_of_their_deployment(tmp_path: Path) -> None:
    """DiT: trtllm-serve at its default port, which names the model after its directory. UNet: the C++ backend."""
    fill_all(COMMANDS["dit"], tmp_path)
    dit = parameters_of(tmp_path, "cosyvoice2_dit")
    assert (dit["llm_transport"], dit["llm_urls"]) == ("openai", "http://localhost:8000/v1")
    assert dit["llm_model"] == "trt_engines_bfloat16"
    fill_all(COMMANDS["unet"], tmp_path)
    unet = parameters_of(tmp_path, "cosyvoice2")
    assert (unet["llm_transport"], unet["llm_backend"], unet["llm_model"]) == ("triton", "tensorrtllm", "tensorrt_llm")
    for template in (*COMMANDS["dit"], *COMMANDS["unet"]):
        assert parameters_of(tmp_path, Path(template).name)


def test_the_llm_streams_also_where_the_commands_say_offline(tmp_path, capsys) -> None:
    name = "model_repo/tensorrt_llm"
    fill_all({name: COMMANDS["unet"][name].replace("decoupled_mode:True", "decoupled_mode:False")}, tmp_path)
    config = parse((tmp_path / "tensorrt_llm" / "config.pbtxt").read_text(), "tensorrt_llm")
    assert config.model_transaction_policy.decoupled
    assert "decoupled_mode:False has no effect" in capsys.readouterr().err
