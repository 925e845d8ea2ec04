"""Preparation of what serving reads: downloads, conversions of the LLM, its engine, registered voices."""
