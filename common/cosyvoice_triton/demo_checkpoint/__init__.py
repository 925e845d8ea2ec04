"""The trained demo checkpoint, whose model card is `trained/README.md`, and the mark of weights of this project."""

import json
from pathlib import Path

from cosyvoice_triton import stacks

DEMO = Path("models", "demo")  # where the commands write it, in the current directory
DEMO_SETTINGS = {"default_speaker": "kumo"}  # of its four voices
TRAINED = Path(__file__).resolve().parent / "trained"
VOICES_DIR = "voices"
STACKS = tuple(stack for stack in stacks.BUILT_IN if (TRAINED / stack.checkpoint).is_dir())  # that it has
MANIFEST = "demo_model.json"  # of the demo checkpoint and of random weights, beside the directories of their models


def has_random_weights(directory: Path) -> bool:
    """Return whether the manifest of a checkpoint, or of one that the directory is in, says that it was not trained."""
    for candidate in (directory, *directory.resolve().parents):
        if (candidate / MANIFEST).is_file():
            return bool(json.loads((candidate / MANIFEST).read_text(encoding="utf-8"))["weights"] != "trained")
    return False
