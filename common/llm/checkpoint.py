"""What a HuggingFace directory of the LLM says beside its weights."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open

from common.llm.engines.interface import utterable_ids
from common.llm.speech_tokens import LLMTokenizer

# Speech is short: 30 s of reference, its text and 30 s of answer are below 2,500 tokens. Memory for attention grows
# with this bound, so the 32,768 of the official checkpoint would waste most of it.
MAX_CONTEXT = 4096
HEAD_BIAS = "lm_head.bias"


class Limits(NamedTuple):
    """Ids that a model reads and utters, and the most tokens that one sequence may hold."""

    vocab_size: int
    context: int


def read_limits(model_dir: str | Path) -> Limits:
    """From `config.json`; ValueError where there is none or it is not that of a language model."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} is no HuggingFace model directory: it has no config.json")
    config = json.loads(path.read_text())
    try:
        return Limits(config["vocab_size"], min(config["max_position_embeddings"], MAX_CONTEXT))
    except KeyError as missing:
        raise ValueError(f"{path} is not the configuration of a language model: it has no {missing}") from None


def read_head_bias(model_dir: str | Path) -> np.ndarray | None:
    """`lm_head.bias` (vocabulary,) of the weights; None where they have none.

    CosyVoice2's output head was trained with a bias, Qwen2's has no place for one: transformers, vLLM and TensorRT-LLM
    pass over it when they load the directory.
    """
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            if HEAD_BIAS in weights.keys():
                return weights.get_tensor(HEAD_BIAS).float().numpy()
    return None


def speech_bias(model_dir: str | Path, tokenizer: LLMTokenizer, vocab_size: int) -> np.ndarray:
    """(vocabulary,) float32 to add to logits: the head's bias for what can be uttered, minus infinity for the rest."""
    utterable, learned = utterable_ids(tokenizer), read_head_bias(model_dir)
    bias = np.full(vocab_size, -np.inf, np.float32)
    bias[utterable] = 0 if learned is None else learned[utterable]
    return bias
