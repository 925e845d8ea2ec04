"""The LLMs of CosyVoice2 and CosyVoice3 in the official form, small and with random weights."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.prepare.huggingface_llm import COSYVOICE2_LLM, OfficialLLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

HIDDEN, TEXT_ROWS, SPEECH_LOGITS = 64, 640, SPEECH_VOCAB + 3


CONFIG = Qwen2Config(
    vocab_size=TEXT_ROWS,
    hidden_size=HIDDEN,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def write_blank(directory: Path, vocabulary: Sequence[str] = (), network: Qwen2Config = CONFIG) -> Path:
    """Like CosyVoice-BlankEN: a Qwen2 tokenizer without the tokens of CosyVoice, and a configuration.

    vocabulary: by default the letters of bytes."""
    directory.mkdir()
    known = vocabulary or sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(known)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    network.save_pretrained(directory)
    return directory


def official_llm(blank_dir: Path, official: OfficialLLM = COSYVOICE2_LLM) -> dict[str, torch.Tensor]:
    """Random weights under the keys of llm.pt, which has the text model's tied head a second time."""
    torch.manual_seed(0)
    config = Qwen2Config.from_pretrained(blank_dir)
    qwen2 = Qwen2ForCausalLM(config).state_dict()
    state = {f"llm.model.{name}": torch.randn_like(w) * 0.1 for name, w in qwen2.items()}
    state["llm.model.lm_head.weight"] = state["llm.model.model.embed_tokens.weight"]
    return state | {name: torch.randn(shape) for name, shape in official.shapes(config.hidden_size).items()}
