"""Convert a HuggingFace LLM directory to a TensorRT-LLM checkpoint, with upstream's command line. Needs TensorRT-LLM.

    cosyvoice-triton prepare convert-checkpoint --model_dir ./cosyvoice2_llm --output_dir ./trt_weights_bfloat16 \\
        --dtype bfloat16
    trtllm-build --checkpoint_dir ./trt_weights_bfloat16 --output_dir ./trt_engines_bfloat16 \\
        --max_batch_size 64 --max_num_tokens 32768 --gemm_plugin bfloat16
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cosyvoice_triton.arguments import command_parser, fraction, positive_int, reporting_errors
from cosyvoice_triton.cli.upstream import accept_upstream_options
from cosyvoice_triton.prepare.trtllm_checkpoint import WEIGHT_ONLY, convert


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument("--model_dir", type=Path, required=True, help="HuggingFace directory of the LLM")
    parser.add_argument("--output_dir", type=Path, default=Path("tllm_checkpoint"), help="directory to write")
    parser.add_argument("--dtype", choices=("auto", "float16", "bfloat16", "float32"), default="auto")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        parser.add_argument(f"--{name}_size", type=positive_int, default=1, help=f"GPUs of {what} parallelism")
    parser.add_argument("--workers", type=positive_int, default=1, help="ranks converted in parallel")
    parser.add_argument("--use_weight_only", action="store_true", help="quantise only the weights")
    parser.add_argument("--weight_only_precision", nargs="?", choices=tuple(WEIGHT_ONLY), const="int8", default="int8")
    parser.add_argument("--group_size", type=positive_int, default=128, help="for int4_gptq")
    parser.add_argument("--disable_weight_only_quant_plugin", action="store_true")
    parser.add_argument("--smoothquant", "-sq", type=fraction, help="alpha in 0..1: weights and activations in int8")
    parser.add_argument("--per_channel", action="store_true", help="smoothquant: one scale per channel")
    parser.add_argument("--per_token", action="store_true", help="smoothquant: one scale per token")
    parser.add_argument("--int8_kv_cache", action="store_true", help="KV cache in int8")
    parser.add_argument("--calib_dataset", default="ccdv/cnn_dailymail", help="for smoothquant and the int8 KV cache")
    parser.add_argument("--load_model_on_cpu", action="store_true", help="read the weights without the GPU")
    parser.add_argument("--use_parallel_embedding", action="store_true")
    parser.add_argument("--embedding_sharding_dim", type=int, choices=(0, 1), default=0)
    accept_upstream_options(parser, "convert_checkpoint")
    return parser


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.use_weight_only and args.smoothquant is not None:
        raise ValueError("--use_weight_only and --smoothquant exclude each other")
    try:
        convert(args)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{error}. TensorRT-LLM is not installed here: run this in NVIDIA's Triton image with TensorRT-LLM (tags "
            "that end in trtllm-python-py3), or serve the directory with another engine, see docs/llm.md"
        ) from None
    print(f"{args.output_dir}: written")
    return 0
