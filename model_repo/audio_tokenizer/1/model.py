"""audio_tokenizer: 16 kHz reference recordings to prompt speech tokens, as ids of the LLM's vocabulary."""

from cosyvoice_triton.voice.model import AudioTokenizerModel


class TritonPythonModel(AudioTokenizerModel):
    pass
