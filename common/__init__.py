"""The library of the Triton models and the tools. docs/architecture.md has a map of its rooms."""
