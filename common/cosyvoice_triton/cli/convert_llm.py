"""Make the HuggingFace directory of the LLM from the official files: llm.pt and CosyVoice-BlankEN.

    cosyvoice-triton prepare convert-llm --llm-pt CosyVoice2-0.5B/llm.pt \\
        --blank-dir CosyVoice2-0.5B/CosyVoice-BlankEN --output-dir models/official/cosyvoice2_llm

The official checkpoint has an embedding and an output head for speech next to Qwen2's own, and an embedding of two
special tokens. Here they become tokens appended to Qwen2's vocabulary, so that any server of Qwen2 can run the LLM:
<|s_0|> to <|s_6560|>, <|eos1|> to <|eos3|>, <|sos|>, <|task_id|>. The head's bias is stored as `lm_head.bias`, which
Qwen2 does not have: `prepare engine` and the engines of the model `tensorrt_llm` read it, other
servers ignore it.

The llm.pt and llm.rl.pt of CosyVoice3 are recognised by their tensors: docs/cosyvoice3.md.
"""

from pathlib import Path

from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.prepare.huggingface_llm import DTYPES, convert


@reporting_errors()
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--llm-pt", type=Path, required=True, help="the official llm.pt")
    parser.add_argument("--blank-dir", type=Path, required=True, help="the official CosyVoice-BlankEN directory")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to write")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    args = parser.parse_args(argv)
    convert(args.llm_pt, args.blank_dir, args.output_dir, DTYPES[args.dtype])
    print(f"{args.output_dir}: written")
    return 0
