"""The Triton models that turn a request into audio."""
