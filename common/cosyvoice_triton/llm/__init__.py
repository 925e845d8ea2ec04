"""Clients and engines of the LLM, which continues text and a voice's speech tokens with new speech tokens."""
