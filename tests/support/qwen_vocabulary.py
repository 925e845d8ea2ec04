"""The text vocabulary of CosyVoice-BlankEN, which the LLM is built on, made from a package that ships Qwen's tokens."""

import base64
import functools
import importlib.util
import json
import re
import shutil
from pathlib import Path

from cosyvoice_triton.prepare.hub import digest_of
from tokenizers import Tokenizer, models

from tests.random_weights.llm import build_tokenizer

SIZE = 151_643
# CosyVoice-BlankEN has none of the merges of Qwen2 that join a Chinese character to another or to a blank before it.
CHINESE = re.compile(r"(?=..) ?[\u4e00-\u9fff]+")
CONFIG = Path(__file__).parents[1] / "assets/blank_en_config.json"
# Beginnings of the blob hashes of the same files on the hub.
HUB_DIGESTS = {"vocab.json": "git:4783fe10", "merges.txt": "git:90d3d82d", "config.json": "git:463b0552"}


def write_blank_en(directory: Path) -> None:
    """Write CosyVoice-BlankEN without its weights: the hub's files, byte for byte, and a tokenizer_config.json."""
    directory.mkdir(parents=True)
    vocabulary, merges = _read()
    (directory / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False, separators=(",", ":")))
    (directory / "merges.txt").write_text("".join(f"{first} {second}\n" for first, second in merges))
    shutil.copy(CONFIG, directory / "config.json")
    for name, digest in HUB_DIGESTS.items():
        assert digest_of(directory / name, git=True).startswith(digest), name
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    added = {SIZE + index: {"content": token, "special": True} for index, token in enumerate(specials)}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": specials[2], "pad_token": specials[0]}
    config |= {"added_tokens_decoder": added, "additional_special_tokens": specials[1:], "model_max_length": 32768}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def qwen2_tokenizer() -> Tokenizer:
    """CosyVoice-BlankEN's tokenizer with tokens of speech after its own; takes two seconds."""
    vocabulary, merges = _read()
    tokenizer = build_tokenizer(text_vocab=SIZE)
    tokenizer.model = models.BPE(vocab=vocabulary, merges=merges)
    return tokenizer


@functools.cache
def _read() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The ids of the tokens, and the merges in their order."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    package = importlib.util.find_spec("dashscope")  # not imported: it has many requirements
    assert package is not None and package.origin is not None, "dashscope is missing: run `make setup-dev`"
    lines = (Path(package.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    assert len(ranks) == SIZE
    letters = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        (text(first), text(second))
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1 and not CHINESE.fullmatch(token.decode(errors="replace"))
        for first, second in [_halves(token, ranks)]
    ]
    return {text(token): rank for token, rank in ranks.items()}, merges


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that are merged to this one: what merges of lower ranks make of its bytes."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        at = min(range(len(parts) - 1), key=lambda at: ranks.get(parts[at] + parts[at + 1], SIZE))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
