"""The teacher's voices and phones, for the stages that are trained on its speech."""

from demo_voice.training.kokoro import VOICES
from demo_voice.training.phonemes import PHONES

__all__ = ["PHONES", "VOICES"]
