"""The Triton models that clients call: from a request to its audio, through the other models."""
