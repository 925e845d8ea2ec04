"""Ways to the LLM that turns text and a voice's speech tokens into new speech tokens."""
