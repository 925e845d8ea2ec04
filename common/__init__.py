"""The library behind the Triton models: networks, streaming, scheduling, the way to the LLM. README.md has a map."""
