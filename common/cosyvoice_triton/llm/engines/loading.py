"""Chooses and loads the engine for a directory: the named one, or the best that can be imported and reads it."""

import importlib
import logging
from pathlib import Path

from cosyvoice_triton.config import TensorrtLLMConfig, device_of
from cosyvoice_triton.llm.engines.interface import Engine
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

logger = logging.getLogger(__name__)

# Best first: the module, imported only if chosen, and the kinds of directory that it reads.
_ENGINES = {
    "tensorrt_llm": ("cosyvoice_triton.llm.engines.trtllm", ("TensorRT engines", "HuggingFace")),
    "vllm": ("cosyvoice_triton.llm.engines.vllm", ("HuggingFace",)),
    "cuda": ("cosyvoice_triton.llm.engines.cuda.engine", ("HuggingFace",)),
    "onnxruntime_genai": ("cosyvoice_triton.llm.engines.genai", ("onnxruntime-genai",)),
}
_KINDS = {"onnxruntime-genai": "genai_config.json", "TensorRT engines": "rank0.engine", "HuggingFace": "config.json"}


def engine_of(config: TensorrtLLMConfig, tokenizer: LLMTokenizer) -> Engine:
    """Serve `engine_dir` with the named engine or, for "auto", the best one.

    Raises ValueError if no engine can, or if the model lacks the speech tokens of `tokenizer`.
    """
    name, model_dir = config.engine, config.engine_dir
    kind = _kind_of(Path(model_dir))
    obstacles = []
    for engine, (module_name, kinds) in _ENGINES.items():
        if name not in ("auto", engine):
            continue
        if kind not in kinds:
            obstacles.append(f"{engine} reads a directory of {' or '.join(kinds)}")
            continue
        if engine == "cuda" and name == "auto" and device_of(config.instance_kind) == "cpu":
            obstacles.append("cuda is taken for a GPU only, unless it is named")
            continue
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            obstacles.append(f"{engine} cannot be imported ({error})")
            continue
        if config.llm_gpu and engine != "cuda":
            raise ValueError(
                f"parameter 'llm_gpu' {config.llm_gpu} is for the engine cuda; {engine} has the first GPU it sees"
            )
        logger.info("the LLM in %s is served by %s", model_dir, engine)
        return module.load_engine(config, tokenizer)
    raise ValueError(
        f"no engine for {model_dir}, a directory of {kind}: {'; '.join(obstacles)}. "
        "docs/llm.md describes how to convert a HuggingFace directory for the CPU"
    )


def _kind_of(model_dir: Path) -> str:
    for kind, file in _KINDS.items():
        if (model_dir / file).is_file():
            return kind
    raise ValueError(f"{model_dir} contains no LLM: it has none of {', '.join(_KINDS.values())}")
