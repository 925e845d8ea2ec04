"""token2wav_cosyvoice3: speech tokens to 24 kHz audio, CosyVoice3's flow and causal HiFT."""

from cosyvoice_triton import stacks
from cosyvoice_triton.token2wav.serving.model import Token2WavModel


class TritonPythonModel(Token2WavModel):
    stack = stacks.COSYVOICE3
