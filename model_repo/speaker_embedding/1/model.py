"""speaker_embedding: 16 kHz reference recordings to x-vectors of their speakers."""

from cosyvoice_triton.voice.model import SpeakerEmbeddingModel


class TritonPythonModel(SpeakerEmbeddingModel):
    pass
