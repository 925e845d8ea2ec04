"""Random weights of every stack in the official formats; nothing else of `tests` is imported: a container mounts this
folder alone."""
