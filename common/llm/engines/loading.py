"""Chooses and loads the engine for a directory: the named one, or the best that can be imported and reads it."""

import importlib
import importlib.util
import logging
from pathlib import Path

from common.config import TensorrtLLMConfig
from common.llm.engines.interface import Engine
from common.llm.speech_tokens import LLMTokenizer

logger = logging.getLogger(__name__)

# Best first: the module, imported only if chosen, and the kinds of directory that it reads.
_ENGINES = {
    "tensorrt_llm": ("common.llm.engines.trtllm", ("TensorRT engines", "HuggingFace")),
    "vllm": ("common.llm.engines.vllm", ("HuggingFace",)),
    "onnxruntime_genai": ("common.llm.engines.genai", ("onnxruntime-genai",)),
}
_KINDS = {"onnxruntime-genai": "genai_config.json", "TensorRT engines": "rank0.engine", "HuggingFace": "config.json"}


def load_engine(
    name: str,
    model_dir: str | Path,
    tokenizer: LLMTokenizer,
    max_requests: int,
    gpu_share: float = TensorrtLLMConfig.gpu_share,
) -> Engine:
    """Serve `model_dir` with the engine `name` or, for "auto", the best one. `gpu_share`: share of the GPU's memory for
    the LLM; token2wav needs the rest.

    Raises ValueError if no engine can, or if the model lacks the speech tokens of `tokenizer`.
    """
    kind = _kind_of(Path(model_dir))
    obstacles = []
    for engine, (module_name, kinds) in _ENGINES.items():
        if name not in ("auto", engine):
            continue
        if kind not in kinds:
            obstacles.append(f"{engine} reads a directory of {' or '.join(kinds)}")
            continue
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            obstacles.append(f"{engine} cannot be imported ({error})")
            continue
        logger.info("the LLM in %s is served by %s", model_dir, engine)
        return module.load_engine(model_dir, tokenizer, max_requests, gpu_share)
    raise ValueError(
        f"no engine for {model_dir}, a directory of {kind}: {'; '.join(obstacles)}. "
        "docs/llm.md describes how to convert a HuggingFace directory for the CPU"
    )


def gpu_engine_installed() -> bool:
    """Whether an engine is installed that reads a HuggingFace directory without conversion. Imports none."""
    return any(importlib.util.find_spec(name) for name, (_, kinds) in _ENGINES.items() if "HuggingFace" in kinds)


def _kind_of(model_dir: Path) -> str:
    for kind, file in _KINDS.items():
        if (model_dir / file).is_file():
            return kind
    raise ValueError(f"{model_dir} contains no LLM: it has none of {', '.join(_KINDS.values())}")
