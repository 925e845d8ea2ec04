"""cosyvoice2: text and a reference recording to speech, through the other models and the vocoder token2wav."""

from common.orchestrator.model import UNET, OrchestratorModel


class TritonPythonModel(OrchestratorModel):
    vocoder = UNET
