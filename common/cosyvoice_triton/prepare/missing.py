"""The files that a stack would load and that do not exist, with the command that makes them."""

from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.demo_checkpoint import STACKS
from cosyvoice_triton.server.options import StackOptions


def require_files(options: StackOptions) -> None:
    """Raise ValueError naming the first missing file of the stack and the command that makes it."""
    if missing := options.missing_files():
        raise ValueError(f"{missing[0]} is missing; {remedy(options, missing[0])}")


def remedy(options: StackOptions, missing: Path) -> str:
    """Return the command that makes a missing part of the checkpoint."""
    prepare, models = "cosyvoice-triton prepare", options.models_dir
    if missing == options.engine_dir and options.llm_backend == "tensorrtllm":
        return f"run: {prepare} engine {models} --stack {options.stack} (in NVIDIA's image, see docs/llm.md)"
    if missing == options.engine_dir and options.tokenizer_dir.exists():
        instead = "leave --llm-engine-dir out and " if options.llm_engine_dir else ""
        return f"{instead}run: {prepare} engine {models} --stack {options.stack} --kind onnxruntime_genai"
    if stacks.named(options.stack) in STACKS:
        other = f"for the demo checkpoint: {prepare} demo {models} --stack {options.stack}"
    else:
        other = f"for random weights, in a clone: python -m tests.random_weights {models}-random"
    return f"for the official files run: {prepare} download {models} --stack {options.stack}; {other}"
