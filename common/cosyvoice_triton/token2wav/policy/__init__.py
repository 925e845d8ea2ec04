"""Decisions without tensors: which listeners are admitted, and which chunks are rendered in one batch."""
