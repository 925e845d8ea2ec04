"""Settings of cosyvoice_triton.cli.render, and the command that makes a missing part of the checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.demo_checkpoint.checkpoint import STACKS
from cosyvoice_triton.server.rendering import StackOptions


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """`key=value` items as a dict; ValueError naming one that is not a pair."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--set {pair!r} is not KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def remedy(options: StackOptions, missing: Path) -> str:
    """The command that makes a missing part of the checkpoint."""
    if missing == options.engine_dir and options.llm_backend == "tensorrtllm":
        return (
            "convert the LLM with cosyvoice-triton convert-checkpoint and build it with trtllm-build, see docs/llm.md"
        )
    if missing == options.engine_dir and options.tokenizer_dir.exists():
        return f"run: cosyvoice-triton convert-genai --model-dir {options.tokenizer_dir} --output-dir {missing}"
    download = f"cosyvoice-triton prepare download {options.models_dir} --stack {options.stack}"
    if stacks.named(options.stack) in STACKS:
        other = f"for the demo checkpoint: python -m cosyvoice_triton.demo_checkpoint.make {options.models_dir}"
    else:
        make = "python -m cosyvoice_triton.demo_checkpoint.make"
        other = f"for random weights: {make} {options.models_dir}-random --weights random"
    return f"for the official files run: {download}; {other}"
