"""The documents' own commands, typed as they stand: what `fill_template.py` makes of the templates is a stack."""

import shutil
import subprocess
import sys
from pathlib import Path

from cosyvoice_triton.cli import fill_template
from cosyvoice_triton.server.rendering import TEMPLATES, parse

from tests.conftest import ROOT
from tests.support.server_requests import read_settings

ENCODER = "model_dir:./CosyVoice2-0.5B,triton_max_batch_size:{batch},max_queue_delay_microseconds:0"
ORCHESTRATOR = (
    "model_dir:./CosyVoice2-0.5B,bls_instance_num:{instances},llm_tokenizer_dir:./cosyvoice2_llm,"
    "triton_max_batch_size:{batch},decoupled_mode:True,max_queue_delay_microseconds:0"
)
LLM = (
    "triton_backend:tensorrtllm,triton_max_batch_size:16,decoupled_mode:True,max_beam_width:1,"
    "engine_dir:./trt_engines_bfloat16,max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,"
    "kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,enable_kv_cache_reuse:False,"
    "batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:0,"
    "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32"
)
# Stage 2 of run_stepaudio2_dit_token2wav.sh and of run.sh: the templates, and the substitutions of each.
DIT = {
    "model_repo_dit/token2wav_dit": "model_dir:./Step-Audio-2-mini/token2wav,triton_max_batch_size:1,"
    "max_queue_delay_microseconds:0",
    "model_repo_dit/cosyvoice2_dit": ORCHESTRATOR.format(batch=1, instances=10),
    "model_repo/audio_tokenizer": ENCODER.format(batch=1),
    "model_repo/speaker_embedding": ENCODER.format(batch=1),
}
UNET = {
    "model_repo/token2wav": ENCODER.format(batch=16),
    "model_repo/cosyvoice2": ORCHESTRATOR.format(batch=16, instances=4),
    "model_repo/tensorrt_llm": LLM,
    "model_repo/audio_tokenizer": ENCODER.format(batch=16),
    "model_repo/speaker_embedding": ENCODER.format(batch=16),
}


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
    fill(DIT, tmp_path)
    dit = parameters_of(tmp_path, "cosyvoice2_dit")
    assert (dit["llm_transport"], dit["llm_urls"]) == ("openai", "http://localhost:8000/v1")
    assert dit["llm_model"] == "trt_engines_bfloat16"
    fill(UNET, tmp_path)
    unet = parameters_of(tmp_path, "cosyvoice2")
    assert (unet["llm_transport"], unet["llm_backend"], unet["llm_model"]) == ("triton", "tensorrtllm", "tensorrt_llm")
    for template in (*DIT, *UNET):
        assert parameters_of(tmp_path, Path(template).name)


def test_the_script_runs_by_its_path_as_the_documents_call_it(tmp_path: Path) -> None:
    config = Path(shutil.copy(TEMPLATES / "model_repo" / "token2wav" / "config.pbtxt", tmp_path))
    command = [sys.executable, "scripts/fill_template.py", "-i", str(config), UNET["model_repo/token2wav"]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert parse(config.read_text(), "token2wav").parameters["model_dir"].string_value == "./CosyVoice2-0.5B"


def test_the_llm_streams_also_where_the_commands_say_offline(tmp_path, capsys) -> None:
    fill({"model_repo/tensorrt_llm": LLM.replace("decoupled_mode:True", "decoupled_mode:False")}, tmp_path)
    config = parse((tmp_path / "tensorrt_llm" / "config.pbtxt").read_text(), "tensorrt_llm")
    assert config.model_transaction_policy.decoupled
    assert "decoupled_mode:False has no effect" in capsys.readouterr().err
