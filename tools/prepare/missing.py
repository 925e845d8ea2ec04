"""Settings of scripts.render, and the command that makes a missing part of the checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from common import stacks
from common.server.rendering import StackOptions
from tools.demo_model.checkpoint import STACKS


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """`key=value` items as a dict; ValueError naming one that is not a pair."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--set {pair!r} is not KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def remedy(options: StackOptions, missing: Path) -> str:
    """The command that makes a missing part of the checkpoint."""
    if missing == options.engine_dir and options.llm_backend == "tensorrtllm":
        return "convert the LLM with scripts.convert_checkpoint and build it with trtllm-build, see docs/llm.md"
    if missing == options.engine_dir and options.tokenizer_dir.exists():
        return f"run: python -m scripts.convert_genai --model-dir {options.tokenizer_dir} --output-dir {missing}"
    download = f"python -m scripts.prepare download {options.models_dir} --stack {options.stack}"
    if stacks.named(options.stack) in STACKS:
        other = f"for the demo checkpoint: python -m tools.demo_model.make {options.models_dir}"
    else:
        other = f"for random weights: python -m tools.demo_model.make {options.models_dir}-random --weights random"
    return f"for the official files run: {download}; {other}"
