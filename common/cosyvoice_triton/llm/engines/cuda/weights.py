"""The network's weights from a HuggingFace directory, in the form in which they are multiplied."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cosyvoice_triton.llm.checkpoint import MAX_CONTEXT, speech_bias
from cosyvoice_triton.llm.engines.cuda.operations import INTERLEAVE
from cosyvoice_triton.llm.engines.interface import candidate_ids, require_speech_tokens
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer


@dataclass(frozen=True, kw_only=True)
class Qwen2Sizes:
    """The sizes of a Qwen2 network.

    vocab: number of input ids. context: maximum number of tokens in one sequence. theta: base of RoPE's frequencies.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    eps: float
    theta: float
    context: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def read(cls, model_dir: Path) -> "Qwen2Sizes":
        """Read them from `config.json`. ValueError if it is not that of a Qwen2 network."""
        path = model_dir / "config.json"
        if not path.is_file():
            raise ValueError(f"{model_dir} is not a HuggingFace model directory: it has no config.json")
        config = json.loads(path.read_text())
        if config.get("model_type") != "qwen2":
            raise ValueError(f"{path}: the engine cuda runs models of type qwen2, not {config.get('model_type')!r}")
        rope = config.get("rope_parameters") or config  # transformers 5 writes the former
        try:
            return cls(
                vocab=config["vocab_size"],
                hidden=config["hidden_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                mlp=config["intermediate_size"],
                eps=config["rms_norm_eps"],
                theta=rope["rope_theta"],
                context=min(config["max_position_embeddings"], MAX_CONTEXT),
            )
        except KeyError as missing:
            raise ValueError(f"{path} is not the configuration of a language model: it has no {missing}") from None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The weights of one layer. The weights of the RMS norm before a product are multiplied into its matrix.

    qkv ((heads + 2 kv_heads) * D, hidden), qkv_bias; out (hidden, heads * D); gate_up (2 * mlp, hidden), INTERLEAVE
    gate rows and INTERLEAVE up rows alternately; down (hidden, mlp).
    """

    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The network's weights on a device.

    embedding (vocab, hidden); head (C, hidden) for the ids from `first`, and its bias (C,) in float32, minus infinity
    for ids that are never sampled; rotary (2, context, D / 2): cosines and sines in float32.
    """

    sizes: Qwen2Sizes
    embedding: Tensor
    layers: list[LayerWeights]
    head: Tensor
    bias: Tensor
    first: int
    rotary: Tensor

    @classmethod
    def read(
        cls, model_dir: str | Path, tokenizer: LLMTokenizer, device: torch.device, dtype: torch.dtype
    ) -> "Weights":
        """Load a HuggingFace directory.

        ValueError if it holds no Qwen2 network, or lacks the speech tokens of `tokenizer`.
        """
        directory = Path(model_dir)
        sizes = Qwen2Sizes.read(directory)
        if sizes.mlp % INTERLEAVE:
            raise ValueError(f"{directory}: intermediate_size {sizes.mlp} is not a multiple of {INTERLEAVE}")
        require_speech_tokens(tokenizer, sizes.vocab, directory)
        files: dict[str, Path] = {}  # by tensor
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as weights:
                files |= dict.fromkeys(weights.keys(), path)

        def of(name: str) -> Tensor:
            if name not in files:
                raise ValueError(f"{directory} is not a complete Qwen2 network: its *.safetensors have no {name}")
            with safe_open(files[name], framework="pt") as weights:
                return weights.get_tensor(name).to(device).float()

        def of_layer(index: int, name: str) -> Tensor:
            return of(f"model.layers.{index}.{name}")

        layers = [cls._layer(partial(of_layer, index), dtype) for index in range(sizes.layers)]
        candidates = candidate_ids(tokenizer)
        first, last = int(candidates[0]), int(candidates[-1])
        head = of("lm_head.weight" if "lm_head.weight" in files else "model.embed_tokens.weight")
        bias = torch.from_numpy(speech_bias(directory, tokenizer, sizes.vocab))
        return cls(
            sizes=sizes,
            embedding=of("model.embed_tokens.weight").to(dtype),
            layers=layers,
            head=(head[first : last + 1] * of("model.norm.weight")).to(dtype),
            bias=bias[first : last + 1].to(device),
            first=first,
            rotary=_rotary(sizes).to(device),
        )

    @staticmethod
    def _layer(of: Callable[[str], Tensor], dtype: torch.dtype) -> LayerWeights:
        qkv = [of(f"self_attn.{name}_proj.weight") for name in "qkv"]
        qkv_bias = [of(f"self_attn.{name}_proj.bias") for name in "qkv"]
        gate_up = [of(f"mlp.{name}_proj.weight").unflatten(0, (-1, INTERLEAVE)) for name in ("gate", "up")]
        return LayerWeights(
            qkv=(torch.cat(qkv) * of("input_layernorm.weight")).to(dtype),
            qkv_bias=torch.cat(qkv_bias).to(dtype),
            out=of("self_attn.o_proj.weight").to(dtype),
            gate_up=(torch.stack(gate_up, 1).flatten(0, 2) * of("post_attention_layernorm.weight")).to(dtype),
            down=of("mlp.down_proj.weight").to(dtype),
        )

    @property
    def nbytes(self) -> int:
        """Return the memory of all weights in bytes."""
        tensors = [self.embedding, self.head, self.bias, self.rotary]
        for layer in self.layers:
            tensors += vars(layer).values()
        return sum(tensor.nbytes for tensor in tensors)


def _rotary(sizes: Qwen2Sizes) -> Tensor:
    pairs = torch.arange(0, sizes.head_dim, 2, dtype=torch.float64) / sizes.head_dim
    angles = torch.arange(sizes.context, dtype=torch.float64)[:, None] * sizes.theta**-pairs
    return torch.stack([angles.cos(), angles.sin()]).float()
