"""The engines that need a GPU, over strict fakes of vLLM and TensorRT-LLM, and the choice among all engines."""

import asyncio
import importlib
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from cosyvoice_triton.config import planned_llm_gib
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.engines import loading
from cosyvoice_triton.llm.engines.genai import BatchingEngine
from cosyvoice_triton.llm.engines.interface import candidate_ids
from cosyvoice_triton.server import options

from tests.support import fake_tensorrt_llm, fake_vllm
from tests.support.llm_fixtures import FAKES, chunks_of, load_engine, request_of

MAX_REQUESTS = 4


@pytest.fixture(params=sorted(FAKES))
def engine(request, install, llm_dir, tokenizer):
    install(request.param)
    engine = load_engine(request.param, llm_dir, tokenizer, MAX_REQUESTS)
    yield engine
    engine.close()
    assert engine._llm.is_shut_down


def test_tokens_and_the_finish_reason_are_returned(engine, tokenizer):
    chunks = asyncio.run(chunks_of(engine, request_of(tokenizer, max_tokens=5)))
    assert [token for chunk in chunks for token in chunk.tokens] == [7, 8, 9, 10, 11]
    assert [chunk.finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert engine.live == 0


async def test_one_request_too_many_is_rejected(engine, tokenizer):
    live = [engine.generate(request_of(tokenizer)) for _ in range(MAX_REQUESTS)]
    for chunks in live:
        await anext(chunks)
    with pytest.raises(UnavailableError, match=f"maximum of {MAX_REQUESTS} requests"):
        await chunks_of(engine, request_of(tokenizer))
    for chunks in live:
        await chunks.aclose()
    assert engine.live == 0 and not engine._llm.live
    await chunks_of(engine, request_of(tokenizer))


@pytest.mark.parametrize(
    ("name", "when", "error"),
    [
        ("vllm", "fails", fake_vllm.EngineDeadError),
        ("vllm", "fails", fake_vllm.EngineGenerateError),
        ("tensorrt_llm", "fails", RuntimeError),
        ("tensorrt_llm", "refuses", RuntimeError),
    ],
)
def test_a_dead_engine_is_unavailable(install, llm_dir, tokenizer, name, when, error):
    install(name)
    engine = load_engine(name, llm_dir, tokenizer, MAX_REQUESTS)
    setattr(engine._llm, when, error("it has died"))
    with pytest.raises(UnavailableError, match="it has died"):
        asyncio.run(chunks_of(engine, request_of(tokenizer)))
    assert engine.live == 0


def test_the_engines_on_a_gpu_use_their_share_of_its_memory(install, llm_dir, tokenizer):
    install("vllm")
    install("tensorrt_llm")
    vllm = load_engine("vllm", llm_dir, tokenizer, MAX_REQUESTS, llm_memory_gib=6.0)
    planned = load_engine("vllm", llm_dir, tokenizer, MAX_REQUESTS)
    tensorrt_llm = load_engine("tensorrt_llm", llm_dir, tokenizer, MAX_REQUESTS, gpu_share=0.15)
    assert vllm._llm.arguments.gpu_memory_utilization == 6 / 24
    assert planned._llm.arguments.gpu_memory_utilization == planned_llm_gib(MAX_REQUESTS) / 24
    assert tensorrt_llm._llm.kv_cache_config.free_gpu_memory_fraction == 0.15


def test_vllm_gets_the_sampling(install, llm_dir, tokenizer):
    install("vllm")
    module = importlib.import_module("cosyvoice_triton.llm.engines.vllm")
    sampling = {"temperature": 0.5, "top_k": 9, "seed": 3, "min_tokens": 4, "max_tokens": 90, "ras_window": 10}
    params = module.sampling_params(request_of(tokenizer, repetition_penalty=1.0, **sampling))
    assert (params.temperature, params.top_k, params.seed, params.min_tokens, params.max_tokens) == (0.5, 9, 3, 4, 90)
    assert params.stop_token_ids == list(tokenizer.end_ids)
    assert params.extra_args == {"ras_window": 10, "ras_tau": 0.1}


def test_tensorrt_llm_gets_the_sampling_and_a_bias_that_excludes_text(install, llm_dir, tokenizer):
    install("tensorrt_llm")
    engine = load_engine("tensorrt_llm", llm_dir, tokenizer, MAX_REQUESTS)
    asyncio.run(chunks_of(engine, request_of(tokenizer, temperature=0, seed=3, min_tokens=2)))
    params = engine._llm.requests[0].sampling
    assert (params.top_k, params.seed, params.min_tokens, params.end_id) == (1, 3, 2, tokenizer.end_ids[0])
    assert torch.isfinite(params.embedding_bias).nonzero().flatten().tolist() == candidate_ids(tokenizer).tolist()
    asyncio.run(chunks_of(engine, request_of(tokenizer)))
    asyncio.run(chunks_of(engine, request_of(tokenizer)))
    assert engine._llm.requests[1].sampling.seed != engine._llm.requests[2].sampling.seed  # its default is a constant
    with pytest.raises(ValueError, match="ras_window 10: TensorRT-LLM has no repetition-aware sampling"):
        asyncio.run(chunks_of(engine, request_of(tokenizer, ras_window=10)))


def test_auto_takes_the_best_engine_that_reads_the_directory(install, llm_dir, genai_dir, tokenizer, monkeypatch):
    chosen = []
    engine = load_engine("auto", genai_dir, tokenizer, 1)
    assert isinstance(engine, BatchingEngine)
    engine.close()
    for name in ("cuda", "vllm", "tensorrt_llm"):
        if name == "cuda":  # as on a GPU
            monkeypatch.setattr(loading, "device_of", lambda kind: "cuda:0")
        else:
            install(name)
        engine = load_engine("auto", llm_dir, tokenizer, 1, instance_kind="KIND_CPU")
        chosen.append(type(engine).__name__)
        engine.close()
    engine = load_engine("auto", genai_dir, tokenizer, 1)
    assert isinstance(engine, BatchingEngine)  # the only one that reads it
    engine.close()
    assert chosen == ["CudaEngine", "VLLMEngine", "TensorRTLLMEngine"]


@pytest.mark.parametrize(
    ("installed", "kind", "gpu", "expected"),
    [
        ("vllm", "KIND_AUTO", False, True),
        ("vllm", "KIND_CPU", True, False),
        ("triton", "KIND_AUTO", True, True),
        ("triton", "KIND_AUTO", False, False),
        ("triton", "KIND_GPU", False, True),
        ("", "KIND_GPU", True, False),
    ],
)
def test_a_huggingface_directory_is_rendered_where_an_engine_reads_it(monkeypatch, installed, kind, gpu, expected):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin="") if name == installed else None
    )
    monkeypatch.setattr(options, "has_gpu", lambda: gpu)
    assert options.reads_huggingface(kind) == expected


def test_no_engine_is_an_error_with_the_reason_for_each(llm_dir, tokenizer):
    with pytest.raises(ValueError) as error:
        load_engine("auto", llm_dir, tokenizer, 1, instance_kind="KIND_CPU")
    for part in (
        "a directory of HuggingFace",
        "tensorrt_llm cannot be imported (No module named 'tensorrt_llm')",
        "vllm cannot be imported (No module named 'vllm')",
        "cuda is taken for a GPU only, unless it is named",
        "onnxruntime_genai reads a directory of onnxruntime-genai",
        "docs/llm.md describes how to convert",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("engine", "directory", "options", "message"),
    [
        ("vllm", "genai_dir", {}, "vllm reads a directory of HuggingFace"),
        ("auto", "tmp_path", {}, "no LLM: it has none of genai_config.json, rank0.engine, config.json"),
        ("onnxruntime_genai", "genai_dir", {"llm_gpu": 1}, "'llm_gpu' 1 is for the engine cuda; onnxruntime_genai"),
    ],
)
def test_what_an_engine_cannot_read_or_do_is_an_error(request, tokenizer, engine, directory, options, message):
    with pytest.raises(ValueError, match=message):
        load_engine(engine, request.getfixturevalue(directory), tokenizer, 1, **options)


def test_built_engines_are_served_with_their_own_limits(install, tokenizer, tmp_path):
    install("tensorrt_llm")
    build = {"pretrained_config": {"vocab_size": 6826}, "build_config": {"max_seq_len": 100}}
    (tmp_path / "config.json").write_text(json.dumps(build))
    (tmp_path / "rank0.engine").touch()
    engine = load_engine("auto", tmp_path, tokenizer, 1)
    assert isinstance(engine._llm, fake_tensorrt_llm.BuiltLLM)
    with pytest.raises(ValueError, match="context of 100"):
        asyncio.run(chunks_of(engine, request_of(tokenizer)))


def test_a_folder_of_a_library_s_name_is_not_the_library(tmp_path, monkeypatch):
    (tmp_path / "no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("no_such_library") is not None
    assert not options._is_installed("no_such_library") and options._is_installed("json")
