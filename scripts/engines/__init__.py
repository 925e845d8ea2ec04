"""Parts of `scripts.build_engines`."""
