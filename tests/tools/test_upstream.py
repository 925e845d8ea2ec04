"""Upstream's command lines, as its documents and programs have them, are accepted by ours."""

import asyncio

import pytest
from cosyvoice_triton.cli import (
    client_grpc,
    convert_checkpoint,
    offline_inference,
    streaming_inference,
    test_llm,
    token2wav,
)
from cosyvoice_triton.cli.upstream import WITHOUT_MEANING
from cosyvoice_triton.config import TensorrtLLMConfig
from cosyvoice_triton.offline.inference import llm_configs

from tests.conftest import ROOT

PARSERS = {
    "convert_checkpoint": lambda arguments: convert_checkpoint.build_parser().parse_args(arguments),
    "client_grpc": client_grpc.parse_args,
    "offline_inference": offline_inference.parse_args,
    "test_llm": lambda arguments: test_llm.build_parser().parse_args(arguments),
    "token2wav": token2wav.parse_args,
    "streaming_inference": streaming_inference.parse_args,
}
NEEDED = {"convert_checkpoint": ["--model_dir", "m"], "client_grpc": [], "offline_inference": ["--output-dir", "o"]}

COMMANDS = (ROOT / "tests/assets/upstream_commands.txt").read_text().splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_is_accepted(command: str) -> None:
    program, *arguments = command.split()
    PARSERS[program](arguments)


@pytest.mark.parametrize("program", WITHOUT_MEANING)
def test_an_option_without_a_meaning_is_explained_in_one_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, reason in WITHOUT_MEANING[program].items():
        parsed = PARSERS[program]([*NEEDED[program], option, "1"])
        assert vars(parsed) == vars(PARSERS[program](NEEDED[program]))
        printed = capsys.readouterr()
        assert printed.err == f"{program}: {option} changes nothing here: {reason}\n" and not printed.out


def test_a_bare_precision_is_int8_as_in_upstreams_program() -> None:
    arguments = ["--model_dir", "m", "--use_weight_only", "--weight_only_precision"]
    assert convert_checkpoint.build_parser().parse_args(arguments).weight_only_precision == "int8"


def test_shares_of_memory_outside_of_0_to_1_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        offline_inference.parse_args(["--output-dir", "o", "--kv-cache-free-gpu-memory-fraction", "60"])
    assert "60 is not in 0..1" in capsys.readouterr().err


def test_the_share_of_memory_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--output-dir", "o", "--backend", "trtllm", "--kv-cache-free-gpu-memory-fraction", "0.3"]
    _, llm = llm_configs(offline_inference.parse_args(arguments))
    assert llm is not None and (llm.engine, llm.gpu_share) == ("tensorrt_llm", 0.3)
    shares: list[float] = []

    def engine_of(config: TensorrtLLMConfig, tokenizer: object) -> object:
        shares.append(config.gpu_share)
        return object()

    monkeypatch.setattr("cosyvoice_triton.cli.test_llm.engine_of", engine_of)
    arguments = ["--tokenizer_dir", "t", "--engine_dir", "e", "--kv_cache_free_gpu_memory_fraction", "0.2"]
    args = test_llm.build_parser().parse_args(arguments)
    asyncio.run(test_llm.speech_lm(args, tokenizer=None))  # type: ignore[arg-type]
    assert shares == [0.2]
