"""token2wav_dit: speech tokens to 24 kHz audio, Step-Audio2's DiT flow and HiFT."""

from cosyvoice_triton import stacks
from cosyvoice_triton.token2wav.serving.model import Token2WavModel


class TritonPythonModel(Token2WavModel):
    stack = stacks.DIT
