"""token2wav: speech tokens to 24 kHz audio, CosyVoice2's UNet flow and HiFT."""

from cosyvoice_triton import stacks
from cosyvoice_triton.token2wav.serving.model import Token2WavModel


class TritonPythonModel(Token2WavModel):
    stack = stacks.UNET
