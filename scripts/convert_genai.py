"""Convert a HuggingFace LLM directory for the onnxruntime_genai engine of the tensorrt_llm model. Offline, done once.

    python -m scripts.convert_genai --model-dir models/official/cosyvoice2_llm \\
        --output-dir models/official/cosyvoice2_llm_genai

The output head keeps its rows of speech and end tokens alone, so that text cannot be uttered and each token reads a
quarter less of the official weights, and it gets the bias that the checkpoint has for them.
"""

import argparse
import sys
from pathlib import Path

from tools.prepare.genai import convert


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
