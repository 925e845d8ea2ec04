"""A HuggingFace directory of the LLM: reads its limits and output bias, writes its JSON files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open

from cosyvoice_triton.demo_checkpoint import MANIFEST
from cosyvoice_triton.llm.engines.interface import candidate_ids
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer, chat_template

# Speech is short: 30 s of reference, its text and 30 s of answer are below 2,500 tokens. Attention memory grows with
# this limit, so the official checkpoint's 32,768 would waste most of it.
MAX_CONTEXT = 4096
HEAD_BIAS = "lm_head.bias"
END_OF_TEXT = "<|endoftext|>"  # of Qwen2


class LLMLimits(NamedTuple):
    """The size of a model's vocabulary, and the maximum number of tokens in one sequence."""

    vocab_size: int
    context: int


def read_limits(model_dir: str | Path) -> LLMLimits:
    """Read `config.json`. ValueError if it is missing or not the configuration of a language model."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} is not a HuggingFace model directory: it has no config.json")
    config = json.loads(path.read_text())
    try:
        return LLMLimits(config["vocab_size"], min(config["max_position_embeddings"], MAX_CONTEXT))
    except KeyError as missing:
        raise ValueError(f"{path} is not the configuration of a language model: it has no {missing}") from None


def follows_instructions(model_dir: str | Path) -> bool:
    """Return whether the model was trained to follow instructions: its `config.json` may say no, as the demo's does."""
    path = Path(model_dir) / "config.json"
    return not path.is_file() or bool(json.loads(path.read_text()).get("follows_instructions", True))


def is_demo(model_dir: str | Path) -> bool:
    """Return whether the model is part of the demo checkpoint, as far as its files are on this machine."""
    return (Path(model_dir).parent / MANIFEST).is_file()


def made_from(model_dir: Path) -> str:
    """Return the name of the official file that the directory was converted from; "" if it does not say."""
    return str(json.loads((model_dir / "config.json").read_text()).get("made_from", ""))


def read_head_bias(model_dir: str | Path) -> np.ndarray | None:
    """Return `lm_head.bias` (vocabulary,) of the weights; None if they have none.

    CosyVoice2's output head was trained with a bias, but Qwen2's has none: transformers, vLLM and TensorRT-LLM ignore
    it when they load the directory.
    """
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            if HEAD_BIAS in weights.keys():
                return weights.get_tensor(HEAD_BIAS).float().numpy()
    return None


def speech_bias(model_dir: str | Path, tokenizer: LLMTokenizer, vocab_size: int) -> np.ndarray:
    """Return the bias (vocabulary,) of the logits in float32.

    It is the head's for speech and end tokens, and minus infinity for others.
    """
    candidates, learned = candidate_ids(tokenizer), read_head_bias(model_dir)
    bias = np.full(vocab_size, -np.inf, np.float32)
    bias[candidates] = 0 if learned is None else learned[candidates]
    return bias


def write_configs(model_dir: Path, network: Mapping[str, object], dtype: str) -> None:
    """Write the JSON files beside `tokenizer.json`, as transformers 4.51 to 5 read them.

    network: `config.json` without what depends on the tokenizer. The defaults of sampling are those of a request.
    """
    tokenizer = LLMTokenizer.from_dir(model_dir)
    ends, added = list(tokenizer.end_ids), tokenizer.tokenizer.get_added_tokens_decoder()
    specials = [token.content for _, token in sorted(added.items()) if token.special and token.content != END_OF_TEXT]
    files: dict[str, dict[str, object]] = {
        "config.json": {
            **network,
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": ends[0],
            "eos_token_id": ends,
            "dtype": dtype,
            "torch_dtype": dtype,  # its name before transformers 4.56, which reads no other
        },
        "generation_config.json": {
            "do_sample": True,
            **{name: getattr(Sampling, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")},
            "eos_token_id": ends,
            "pad_token_id": ends[0],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            # Transformers 5 saves them as `extra_special_tokens`, with which 4 fails; both read this name.
            "additional_special_tokens": specials,
            "model_max_length": network["max_position_embeddings"],
            "add_prefix_space": False,
            "chat_template": chat_template(tokenizer.rules),
        },
    }
    for name, content in files.items():
        (model_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
