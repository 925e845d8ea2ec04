"""cosyvoice2_dit: text and a reference recording to speech, through the other models and the vocoder token2wav_dit."""

from common.orchestrator.model import DIT, OrchestratorModel


class TritonPythonModel(OrchestratorModel):
    vocoder = DIT
