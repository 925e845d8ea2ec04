"""The library behind the Triton models; docs/architecture.md has a map of its rooms."""
