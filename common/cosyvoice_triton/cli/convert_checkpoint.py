"""Convert a HuggingFace LLM directory to a TensorRT-LLM checkpoint, with upstream's command line but for int8 of
activations and of the KV cache, which needs calibration. Needs TensorRT-LLM.

    cosyvoice-triton prepare convert-checkpoint --model_dir ./cosyvoice2_llm --output_dir ./trt_weights_bfloat16 \\
        --dtype bfloat16
    trtllm-build --checkpoint_dir ./trt_weights_bfloat16 --output_dir ./trt_engines_bfloat16 \\
        --max_batch_size 64 --max_num_tokens 32768 --gemm_plugin bfloat16
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cosyvoice_triton.arguments import command_parser, positive_int, reporting_errors
from cosyvoice_triton.cli.upstream import accept_upstream_options
from cosyvoice_triton.llm.checkpoint import read_limits
from cosyvoice_triton.llm.engines.interface import require_speech_tokens
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

WEIGHT_ONLY = {"int8": "W8A16", "int4": "W4A16", "int4_gptq": "W4A16_GPTQ"}


def convert(args: argparse.Namespace) -> None:
    """Write the checkpoint of every rank. ValueError if `model_dir` is not a CosyVoice LLM."""
    require_speech_tokens(LLMTokenizer.from_dir(args.model_dir), read_limits(args.model_dir).vocab_size, args.model_dir)
    from tensorrt_llm.mapping import Mapping
    from tensorrt_llm.models import QWenForCausalLM

    ranks = args.tp_size * args.pp_size
    sizes = {"world_size": ranks, "tp_size": args.tp_size, "pp_size": args.pp_size}
    quantisation = quant_config(args)
    options = {
        "use_parallel_embedding": args.use_parallel_embedding,
        "embedding_sharding_dim": args.embedding_sharding_dim,
        "disable_weight_only_quant_plugin": args.disable_weight_only_quant_plugin,
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)  # TensorRT-LLM writes one file per rank into it

    def convert_rank(rank: int) -> None:
        mapping = Mapping(**sizes, rank=rank)
        model = QWenForCausalLM.from_hugging_face(
            str(args.model_dir),
            args.dtype,
            mapping=mapping,
            quant_config=quantisation,
            load_model_on_cpu=args.load_model_on_cpu,
            **options,
        )
        # Ranks of context parallelism share their weights, so only the configuration changes.
        model.config.mapping.cp_size = args.cp_size
        model.config.mapping.attn_tp_size = model.config.mapping.attn_cp_size = -1
        model.config.mapping.world_size *= args.cp_size
        model.save_checkpoint(str(args.output_dir), save_config=rank == 0)

    with ThreadPoolExecutor(args.workers) as workers:
        list(workers.map(convert_rank, range(ranks)))


def quant_config(args: argparse.Namespace) -> Any:
    """Return TensorRT-LLM's QuantConfig for the options."""
    from tensorrt_llm.models.modeling_utils import QuantConfig
    from tensorrt_llm.quantization import QuantAlgo

    config = QuantConfig()
    if args.use_weight_only:
        config.quant_algo = getattr(QuantAlgo, WEIGHT_ONLY[args.weight_only_precision])
        if args.weight_only_precision == "int4_gptq":
            config.group_size, config.has_zero_point, config.pre_quant_scale = args.group_size, True, False
    return config


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
    parser.add_argument("--load_model_on_cpu", action="store_true", help="read the weights without the GPU")
    parser.add_argument("--use_parallel_embedding", action="store_true")
    parser.add_argument("--embedding_sharding_dim", type=int, choices=(0, 1), default=0)
    accept_upstream_options(parser, "convert_checkpoint")
    return parser


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        convert(args)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{error}. TensorRT-LLM is not installed here: run this in NVIDIA's Triton image with TensorRT-LLM (tags "
            "that end in trtllm-python-py3), or serve the directory with another engine, see docs/llm.md"
        ) from None
    print(f"{args.output_dir}: written")
    return 0
