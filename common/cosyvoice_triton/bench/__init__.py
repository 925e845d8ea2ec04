"""Benchmarks of single parts: token2wav, networks on a CPU, LLM engines and clients, the speech service."""
