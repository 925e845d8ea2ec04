"""The library behind the Triton models: networks, streaming, scheduling, the way to the LLM. See README.md for its rooms."""
