"""The trained demo checkpoint, copied out of the package; `sha256sum -c SHA256SUMS` checks a copy.

The package has files that several stacks have once, so that only a copy is complete.
"""

import hashlib
import json
import shutil
from pathlib import Path

from cosyvoice_triton.demo_checkpoint import MANIFEST, STACKS, TRAINED, VOICES_DIR, has_random_weights
from cosyvoice_triton.voice.files import RECORDINGS

SUMS = "SHA256SUMS"
CARD = "README.md"


def copy_demo(models: Path) -> bool:
    """Copy what `models` lacks; return whether that was anything. Registered voices stay.

    ValueError if `models` has something else, or if a file of the package is damaged, before anything is written.
    """
    listed = (TRAINED / SUMS).read_text(encoding="utf-8")
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in listed.splitlines())}
    if not (models / MANIFEST).is_file() and any(path.name[0] != "." for path in models.iterdir()):
        raise ValueError(f"{models} exists and is no demo checkpoint: name another directory, or remove it")
    if has_random_weights(models):
        raise ValueError(f"{models} has random weights: name another directory, or remove it")
    absent = [name for name, digest in sums.items() if sha256(models / name) != digest]
    stored = {digest: TRAINED / name for name, digest in sums.items() if (TRAINED / name).is_file()}
    sources = {name: stored.get(sums[name], TRAINED / name) for name in absent}
    if damaged := [source for name, source in sources.items() if sha256(source) != sums[name]]:
        raise ValueError(f"{damaged[0]} is damaged: its SHA-256 is not that of {SUMS}")
    known = (models / SUMS).read_text(encoding="utf-8") if (models / SUMS).is_file() else ""
    if not absent and known == listed:
        return False
    if known not in ("", listed):
        _remove_computed(models)
    (models / MANIFEST).write_text(json.dumps({"weights": "trained"}) + "\n", encoding="utf-8")
    for name, source in (*sources.items(), (CARD, TRAINED / CARD), (SUMS, TRAINED / SUMS)):
        target = models / name
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.new")
        shutil.copyfile(source, fresh)
        fresh.rename(target)
    return True


def _remove_computed(models: Path) -> None:
    """Remove what other networks than these have made and these can make again: features of voices whose recording is
    beside them, the LLM's form for a CPU. An uploaded voice has its only recording in such a file."""
    for path in (models / VOICES_DIR).glob("*.safetensors"):
        if any(path.with_suffix(ending).exists() for ending in RECORDINGS):
            path.unlink()
    for llm in {stack.llm.genai for stack in STACKS}:
        shutil.rmtree(models / llm, ignore_errors=True)


def sha256(path: Path) -> str:
    """Return the digest of a file; "" if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
