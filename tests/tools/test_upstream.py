"""Upstream's command lines, as its documents and programs have them, are accepted by ours. The offline tool: what its
options say of the LLM, its output folder, and which samples a second run keeps."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cosyvoice_triton.cli import (
    client_grpc,
    convert_checkpoint,
    offline_inference,
    streaming_inference,
    test_llm,
    token2wav,
)
from cosyvoice_triton.cli.offline_inference import JOURNAL, SILENT_SECONDS, OutputFolder, identity, llm_configs
from cosyvoice_triton.cli.upstream import WITHOUT_MEANING
from cosyvoice_triton.config import TensorrtLLMConfig
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.offline import shared
from cosyvoice_triton.offline.shared import SampleRun
from cosyvoice_triton.voice.audio import save_audio
from cosyvoice_triton.voice.prompt import Recording

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


SETTINGS = {"backend": "hf", "seed": 0}
SAMPLE = Sample("a", "Hello.", Recording(np.full(100, 0.5, np.float32)), "The transcript.")
AUDIO = np.linspace(-0.5, 0.5, SAMPLE_RATE, dtype=np.float32)
TOKENS = [5, 6560]


def save(path, *samples, settings=SETTINGS):
    folder = OutputFolder(path, settings)
    for sample in samples:
        save_audio(folder.audio(sample), AUDIO, SAMPLE_RATE)
        folder.record(sample, 1.0, TOKENS, cut_short=False)


def holds(path, sample, settings=SETTINGS):
    return OutputFolder(path, settings).holds(sample)


@pytest.mark.parametrize(
    "changed",
    [
        {"target_text": "Bye."},
        {"prompt_text": "Another transcript."},
        {"prompt_audio": Recording(np.full(100, 0.4, np.float32))},
        {"id": "b"},
    ],
)
def test_a_sample_with_another_text_or_voice_is_not_finished(tmp_path, changed):
    save(tmp_path, SAMPLE)
    assert not holds(tmp_path, replace(SAMPLE, **changed))


def test_samples_with_other_settings_replace_the_earlier_ones(tmp_path):
    save(tmp_path, SAMPLE)
    other = SETTINGS | {"seed": 1}
    assert not holds(tmp_path, SAMPLE, other)
    save(tmp_path, SAMPLE, settings=other)
    assert holds(tmp_path, SAMPLE, other) and not holds(tmp_path, SAMPLE)


def test_a_sample_without_audio_or_with_an_incomplete_line_is_not_finished(tmp_path):
    save(tmp_path, SAMPLE, replace(SAMPLE, id="b"))
    journal = tmp_path / JOURNAL
    journal.write_text(journal.read_text()[:-30])  # as if killed while writing the last line
    assert holds(tmp_path, SAMPLE) and not holds(tmp_path, replace(SAMPLE, id="b"))
    save(tmp_path, replace(SAMPLE, id="b"))
    assert holds(tmp_path, SAMPLE) and holds(tmp_path, replace(SAMPLE, id="b"))
    (tmp_path / "a.wav").unlink()
    assert not holds(tmp_path, SAMPLE)


def test_an_unwritable_folder_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write to .*; choose another folder"):
        OutputFolder(tmp_path / "file", SETTINGS)


def test_a_replaced_checkpoint_has_another_identity(tmp_path):
    (tmp_path / "flow.pt").write_bytes(b"1")
    before = identity(tmp_path)
    assert before == identity(tmp_path)
    (tmp_path / "flow.pt").write_bytes(b"12")
    assert before != identity(tmp_path)


def test_the_time_of_each_stage_is_that_in_which_a_sample_is_in_it():
    clock = iter([0.0, 1.0, 3.0, 4.0, 5.0, 7.0, 10.0, 10.0, 20.0])
    made = SampleRun(("llm", "token2wav", "idle"), lambda: next(clock))
    with made.sample(SAMPLE) as enter, made.sample(SAMPLE) as other:
        enter("llm")  # 1 to 5, with the other one to 7
        other("llm")
        enter("llm")
        enter("token2wav")  # 5 to 10
        other("")
        raise ValueError("the time of a\nfailed stage counts")
    assert made.failures == [{"id": "a", "stage": "", "error": "the time of a failed stage counts"}]
    made.audio_seconds = 20.0
    seconds = {"llm": 6.0, "token2wav": 5.0, "idle": 0.0, "pipeline": 20.0}
    expected = {f"{stage}_time_seconds": of for stage, of in seconds.items()}
    expected |= {f"{stage}_rtf": of / 20 for stage, of in seconds.items()}
    assert made.figures() == expected
    made.audio_seconds = 0.0
    assert made.figures(10.0)["llm_rtf"] is None


async def test_a_batch_is_rendered_for_the_others_if_the_one_whose_turn_it_is_is_cancelled(monkeypatch):
    begun, released = threading.Event(), threading.Event()

    def whole_batch(batch):
        begun.set()
        released.wait(60)
        return [np.ones(len(tokens)) for _, tokens in batch]

    engine = SimpleNamespace(warm_up=dict, whole_batch=whole_batch)
    monkeypatch.setattr(shared.Token2Wav, "from_config", lambda *of: engine)
    whole = shared.WholeToken2Wav(None, None, batch_size=2)
    first, second = (asyncio.create_task(whole.offline(None, [0] * length)) for length in (1, 2))
    await asyncio.to_thread(begun.wait, 60)
    first.cancel()
    released.set()
    assert (await second).size == 2 and first.cancelled()
    whole.close()


@pytest.mark.parametrize(
    "backend, device, engine, given, own",
    [
        ("hf", "cpu", "onnxruntime_genai", "given", "llm_genai"),
        ("hf", "cuda", "cuda", "llm", "llm"),
        ("vllm", "cuda", "vllm", "given", "llm"),
        ("trtllm", "cuda", "tensorrt_llm", "given", "llm"),
    ],
)
def test_each_backend_has_an_engine_and_its_directory(backend, device, engine, given, own):
    options = ["--output-dir", "o", "--backend", backend, "--device", device, "--llm-model-name-or-path", "llm"]
    for more, directory in ((["--engine-dir", "given"], given), ([], own)):
        _, llm = llm_configs(offline_inference.parse_args([*options, *more]))
        assert llm is not None and (llm.engine, llm.engine_dir) == (engine, directory)


@pytest.mark.parametrize("path", ["", "/v1", "/v1/chat/completions"])
def test_the_address_of_a_server_may_have_a_path(path):
    arguments = ["--output-dir", "o", "--backend", "trtllm-serve", "--openai-api-base", f"http://localhost:8000{path}"]
    speech, llm = llm_configs(offline_inference.parse_args(arguments))
    assert llm is None and speech.llm_transport == "openai" and speech.token_timeout == SILENT_SECONDS
    assert speech.llm_urls == ("http://localhost:8000/v1" if path.startswith("/v1") else "http://localhost:8000",)
