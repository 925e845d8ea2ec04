"""Vocoders over streams: mel chunks to audio without joints."""
