"""Benchmarks of single parts: token2wav, networks on a CPU, LLM engines and clients, the speech service."""

FULL_SIZE = "in a clone `python -m tests.random_weights DEST --weights random-full` makes some of full size"
