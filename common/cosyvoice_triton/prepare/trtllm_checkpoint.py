"""Convert a HuggingFace LLM directory to a TensorRT-LLM checkpoint. Needs TensorRT-LLM."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cosyvoice_triton.llm.checkpoint import read_limits
from cosyvoice_triton.llm.engines.interface import require_speech_tokens
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

WEIGHT_ONLY = {"int8": "W8A16", "int4": "W4A16", "int4_gptq": "W4A16_GPTQ"}
# By (weight scales per channel, activation scales per token).
SMOOTHQUANT = {
    (False, False): "W8A8_SQ_PER_TENSOR_PLUGIN",
    (False, True): "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    (True, False): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    (True, True): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}


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
    model_dir, output_dir = str(args.model_dir), str(args.output_dir)
    if args.smoothquant is not None or args.int8_kv_cache:  # calibration handles all ranks at once
        QWenForCausalLM.quantize(
            model_dir,
            output_dir,
            dtype=args.dtype,
            mapping=Mapping(**sizes, cp_size=args.cp_size),
            quant_config=quantisation,
            calib_dataset=args.calib_dataset,
            **options,
        )
        return

    def convert_rank(rank: int) -> None:
        mapping = Mapping(**sizes, rank=rank)
        model = QWenForCausalLM.from_hugging_face(
            model_dir,
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
        model.save_checkpoint(output_dir, save_config=rank == 0)

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
    elif args.smoothquant is not None:
        config.quant_algo = getattr(QuantAlgo, SMOOTHQUANT[args.per_channel, args.per_token])
        config.smoothquant_val = args.smoothquant
    if args.int8_kv_cache:
        config.kv_cache_quant_algo = QuantAlgo.INT8
    return config
