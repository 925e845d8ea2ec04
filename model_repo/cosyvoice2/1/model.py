"""cosyvoice2: text and a reference recording to speech, through the stack's other models."""

from cosyvoice_triton import stacks
from cosyvoice_triton.orchestrator.model import OrchestratorModel


class TritonPythonModel(OrchestratorModel):
    stack = stacks.UNET
