"""What has to be set before torch is imported, here and in the servers that tests start."""

import os

# Small networks gain nothing from more threads, and on a busy machine processes whose threads wait for each other take
# many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
