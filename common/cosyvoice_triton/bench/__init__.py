"""Benchmarks: a running server, or a stack in this process, under load; engines of the LLM alone."""
