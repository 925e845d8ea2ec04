"""Benchmarks: a running server, or a stack in this process, under load."""
