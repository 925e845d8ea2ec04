"""Engines that run the LLM inside the Triton model `tensorrt_llm`."""
