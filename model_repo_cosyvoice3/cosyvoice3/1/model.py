"""cosyvoice3: text and a reference recording to speech, through the stack's other models."""

from common import stacks
from common.orchestrator.model import OrchestratorModel


class TritonPythonModel(OrchestratorModel):
    stack = stacks.COSYVOICE3
