"""The official LLM files, llm.pt and CosyVoice-BlankEN, converted to one HuggingFace directory."""

import json
import tempfile
from pathlib import Path

import torch

from common.checkpoint import read_state, shape_differences, shapes_of
from common.constants import SPEECH_VOCAB
from common.llm.checkpoint import HEAD_BIAS
from common.llm.interface import Sampling
from common.llm.speech_tokens import COSYVOICE2, LLMTokenizer, added_tokens, chat_template

# Tokens that CosyVoice2's tokenizer adds to CosyVoice-BlankEN's, in this order.
TEXT_SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|endofprompt|>", "[breath]", "<strong>", "</strong>", "[noise]", "[laughter]"),
    *("[cough]", "[clucking]", "[accent]", "[quick_breath]", "<laughter>", "</laughter>", "[hissing]", "[sigh]"),
    *("[vocalized-noise]", "[lipsmack]", "[mn]"),
)
END_OF_TEXT = "<|endoftext|>"
SPEECH_ROWS = SPEECH_VOCAB + len(COSYVOICE2.ends)  # rows of the official speech embedding and head
VOCAB_MULTIPLE = 128  # upstream's padding; sharded engines need a divisible vocabulary
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def convert(llm_pt: Path, blank_dir: Path, output_dir: Path, dtype: torch.dtype) -> None:
    """Write `output_dir` atomically. ValueError if an input is not the official one."""
    if output_dir.exists():
        raise ValueError(f"{output_dir} exists; remove it or choose another directory")
    if not (blank_dir / "config.json").is_file():
        raise ValueError(f"{blank_dir} is not CosyVoice-BlankEN: it has no config.json")
    state = read_state(llm_pt)
    _check(state, blank_dir, llm_pt)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    # Next to the result, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}.") as scratch:
        built = Path(scratch) / "model"
        tokenizer = _write_tokenizer(blank_dir, built)
        _write_model(state, blank_dir, built, tokenizer, dtype)
        built.rename(output_dir)


def _check(state: dict[str, torch.Tensor], blank_dir: Path, llm_pt: Path) -> None:
    """ValueError listing the keys and shapes in which llm.pt differs from a CosyVoice2 LLM based on BlankEN."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(blank_dir)
    config.tie_word_embeddings = False  # llm.pt has both, although the text head is never used
    with torch.device("meta"):
        qwen2 = AutoModelForCausalLM.from_config(config)
    hidden = config.hidden_size
    expected = {f"llm.model.{name}": shape for name, shape in shapes_of(qwen2.state_dict()).items()} | {
        "llm_embedding.weight": torch.Size((2, hidden)),
        "speech_embedding.weight": torch.Size((SPEECH_ROWS, hidden)),
        "llm_decoder.weight": torch.Size((SPEECH_ROWS, hidden)),
        "llm_decoder.bias": torch.Size((SPEECH_ROWS,)),
    }
    if differences := shape_differences(expected, shapes_of(state)):
        raise ValueError(f"{llm_pt} is not the LLM of CosyVoice2 based on {blank_dir}:\n  " + "\n  ".join(differences))


def _write_tokenizer(blank_dir: Path, built: Path) -> LLMTokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(blank_dir)
    tokenizer.add_special_tokens({"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT})
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in TEXT_SPECIALS if token not in known], special_tokens=True)
    # Not special: servers that skip special tokens when decoding would return empty text.
    tokenizer.add_tokens(added_tokens())
    tokenizer.chat_template = chat_template()
    tokenizer.save_pretrained(built)
    return LLMTokenizer.from_dir(built)


def _write_model(
    state: dict[str, torch.Tensor], blank_dir: Path, built: Path, tokenizer: LLMTokenizer, dtype: torch.dtype
) -> None:
    from safetensors.torch import save_file

    text = state.pop("llm.model.model.embed_tokens.weight")
    del state["llm.model.lm_head.weight"]  # the text head is never used
    first, end = tokenizer.first_speech_id, tokenizer.first_speech_id + SPEECH_ROWS
    if first > len(text):
        raise ValueError(f"{blank_dir} has {first} tokens of text, more than the {len(text)} rows of the embedding")
    vocab = -(-(end + 2) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    embedding, head = (torch.zeros(vocab, text.shape[1]) for _ in range(2))
    bias = torch.full((vocab,), -torch.inf)
    embedding[:first] = text[:first]
    embedding[first:end] = state.pop("speech_embedding.weight")
    embedding[[tokenizer.sos_id, tokenizer.task_id]] = state.pop("llm_embedding.weight").float()
    head[first:end] = state.pop("llm_decoder.weight")
    bias[first:end] = state.pop("llm_decoder.bias")
    weights = {name.removeprefix("llm.model."): tensor for name, tensor in state.items()}
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head, HEAD_BIAS: bias}
    path = built / "model.safetensors"
    contiguous = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    path.chmod(0o644)  # like the other files; safetensors makes it readable by the owner only
    for name, content in _configs(blank_dir, vocab, list(tokenizer.end_ids), dtype).items():
        (built / name).write_text(json.dumps(content, indent=2) + "\n")


def _configs(blank_dir: Path, vocab: int, end_ids: list[int], dtype: torch.dtype) -> dict[str, dict]:
    """The JSON files next to the weights. Sampling defaults are those of the orchestrator."""
    config = json.loads((blank_dir / "config.json").read_text())
    config.pop("torch_dtype", None)
    sampling = {name: getattr(Sampling, name) for name in ("temperature", "top_p", "top_k")}
    return {
        "config.json": config
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": vocab,
            "tie_word_embeddings": False,
            "bos_token_id": end_ids[0],
            "eos_token_id": end_ids,
            "dtype": str(dtype).removeprefix("torch."),
        },
        "generation_config.json": {
            "do_sample": True,
            **sampling,
            "repetition_penalty": Sampling.repetition_penalty,
            "eos_token_id": end_ids,
            "pad_token_id": end_ids[0],
        },
    }
