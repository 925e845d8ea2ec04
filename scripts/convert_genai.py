"""Convert a HuggingFace LLM directory for the onnxruntime_genai engine of the tensorrt_llm model. Offline, done once.

    python -m scripts.convert_genai --model-dir models/official/cosyvoice2_llm \\
        --output-dir models/official/cosyvoice2_llm_genai
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def convert(model_dir: Path, output_dir: Path, precision: str) -> bool:
    """Write `output_dir`, whole or not at all; False if it is there already.

    Raises ValueError where `model_dir` is no model or `output_dir` is something else, RuntimeError on failure.
    """
    if (output_dir / "genai_config.json").is_file():
        return False
    if not (model_dir / "config.json").is_file():
        raise ValueError(f"{model_dir} is no HuggingFace model directory: it has no config.json")
    if output_dir.exists():
        raise ValueError(f"{output_dir} exists and is no conversion; remove it or name another directory")
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    # Beside the result, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}.") as scratch:
        built = Path(scratch) / "model"
        _build(model_dir, built, Path(scratch) / "cache", precision)
        built.rename(output_dir)
    return True


def _build(model_dir: Path, built: Path, cache: Path, precision: str) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(model_dir), "-o", str(built), "-p", precision, "-e", "cpu", "-c", str(cache)]
    # Serving reads the last position's logits only; at the official vocabulary a long prompt's take 100 MB.
    command += ["--extra_options", "prune_lm_head=true"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    # Its standard output is a line per layer and quantised matrix; its progress bars are on standard error.
    finished = subprocess.run(command, env=offline, check=False, stdout=subprocess.PIPE, text=True, errors="replace")
    if finished.returncode:
        print(finished.stdout, file=sys.stderr)
        raise RuntimeError(f"the model builder exited with {finished.returncode} on {model_dir}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, help="HuggingFace directory of the LLM")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to make")
    parser.add_argument("--precision", choices=("int4", "fp32"), default="int4")
    args = parser.parse_args(argv)
    try:
        made = convert(args.model_dir, args.output_dir, args.precision)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"convert_genai: {error}", file=sys.stderr)
        return 1
    print(f"{args.output_dir}: " + ("written" if made else "there already; remove it to convert anew"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
