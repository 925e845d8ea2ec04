"""Convert a HuggingFace LLM directory for onnxruntime_genai, the CPU engine of the model tensorrt_llm. Done once.

    cosyvoice-triton prepare convert-genai --model-dir models/official/cosyvoice2_llm \\
        --output-dir models/official/cosyvoice2_llm_genai

The output head keeps only the rows of speech and end tokens, so that no text token can be sampled and each step reads a
quarter less of the official weights. The checkpoint's bias of these rows is added.
"""

from pathlib import Path

from cosyvoice_triton.cli.arguments import command_parser, reporting_errors
from cosyvoice_triton.prepare.genai import PRECISIONS, convert


@reporting_errors()
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--model-dir", type=Path, required=True, help="HuggingFace directory of the LLM")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to write")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0])
    args = parser.parse_args(argv)
    made = convert(args.model_dir, args.output_dir, args.precision, lambda line: print(line, flush=True))
    print(f"{args.output_dir}: " + ("written" if made else "exists already; remove it to convert again"))
    return 0
