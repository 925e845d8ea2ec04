"""Upstream's name of `cosyvoice-triton streaming`."""

import sys

from cosyvoice_triton.cli.streaming_inference import main

if __name__ == "__main__":
    sys.exit(main())
