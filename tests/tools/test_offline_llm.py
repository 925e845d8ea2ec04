"""What the offline tool's options say of the LLM: engines in this process, servers."""

from pathlib import Path

import pytest
from cosyvoice_triton.cli import offline_inference
from cosyvoice_triton.offline.engines import SILENT_SECONDS, llm_configs, llm_engine


@pytest.mark.parametrize(
    "backend, device, engine, directory",
    [
        ("hf", "cpu", "onnxruntime_genai", "given"),
        ("hf", "cuda", "cuda", "llm"),
        ("vllm", "cuda", "vllm", "given"),
        ("trtllm", "cuda", "tensorrt_llm", "given"),
    ],
)
def test_each_backend_has_an_engine_and_its_directory(backend, device, engine, directory):
    assert llm_engine(backend, Path("llm"), Path("given"), device) == (engine, Path(directory))
    assert llm_engine("hf", Path("llm"), None, "cpu")[1] == Path("llm_genai")


@pytest.mark.parametrize("path", ["", "/v1", "/v1/chat/completions"])
def test_the_address_of_a_server_may_have_a_path(path):
    arguments = ["--output-dir", "o", "--backend", "trtllm-serve", "--openai-api-base", f"http://localhost:8000{path}"]
    speech, llm = llm_configs(offline_inference.parse_args(arguments))
    assert llm is None and speech.llm_transport == "openai" and speech.token_timeout == SILENT_SECONDS
    assert speech.llm_urls == ("http://localhost:8000/v1" if path.startswith("/v1") else "http://localhost:8000",)
