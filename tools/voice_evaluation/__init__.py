"""How well a voice speaks: what is heard in it, its lengths, its joints, whom it sounds like."""

from pathlib import Path

# Everyday sentences, one a line, that no network has heard in training.
HELD_OUT = Path(__file__).resolve().parents[2] / "tests" / "assets" / "everyday_sentences.txt"
