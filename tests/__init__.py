"""Environment variables that must be set before torch is imported, here and in the servers that tests start."""

import os

# Small networks gain nothing from more threads. On a busy machine, threads that wait for each other make a process many
# times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
