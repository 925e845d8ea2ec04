"""Voices: prompts, their encoders, registered voices, audio."""
