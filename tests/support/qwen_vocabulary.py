"""The text vocabulary of Qwen2, on which CosyVoice2's LLM is built, from a package that ships it."""

import base64
import importlib.util
from pathlib import Path

from cosyvoice_triton.demo_checkpoint.llm import build_tokenizer
from tokenizers import Tokenizer, pre_tokenizers

SIZE = 151_643


def qwen2_tokenizer() -> Tokenizer:
    """Qwen2's tokenizer with CosyVoice2's tokens after its own; takes two seconds.

    The package `dashscope` has the ranks of the tokens. Two neighbours are merged if both together are a token, those
    of the lowest rank first.
    """
    package = importlib.util.find_spec("dashscope")  # not imported: it has many requirements
    assert package is not None and package.origin is not None, "dashscope is missing: run `make setup-dev`"
    letters = _letters()
    ranks: dict[str, int] = {}
    for line in (Path(package.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        ranks["".join(letters[byte] for byte in base64.b64decode(token))] = int(rank)
    assert len(ranks) == SIZE
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return build_tokenizer(merges)


def _letters() -> dict[int, str]:
    """Byte -> the character that stands for it in byte-level BPE: itself if it can be printed, else one from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
