"""Engines of the model `tensorrt_llm`."""
