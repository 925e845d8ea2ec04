"""Quality of a voice: word errors, lengths, speaker similarity."""

from pathlib import Path

from cosyvoice_triton import samples

# Everyday sentences, one per line, that are not in the training data.
HELD_OUT = Path(__file__).resolve().parents[2] / "tests" / "assets" / "everyday_sentences.txt"
# The recording of a human, who is not in the training data either.
HUMAN = samples.FOLDER / "reference_en.wav"
HUMAN_TEXT = "Your call is now first in line and will be answered by the next available representative."
