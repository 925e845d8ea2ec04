"""The running token2wav model: its service, streams, threads and requests."""
