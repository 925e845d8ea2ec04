"""Parts of `tools.export.engines`."""
