"""Quality of a voice: word errors, lengths, joints between chunks, speaker similarity."""

from pathlib import Path

# Everyday sentences, one per line, that are not in the training data.
HELD_OUT = Path(__file__).resolve().parents[2] / "tests" / "assets" / "everyday_sentences.txt"
