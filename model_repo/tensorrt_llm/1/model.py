"""tensorrt_llm: ids of a prompt to ids of speech tokens, on the python backend."""

from cosyvoice_triton.llm.triton_model import TensorrtLLMModel


class TritonPythonModel(TensorrtLLMModel):
    pass
