"""Upstream's name of `cosyvoice-triton offline`."""

import sys

from cosyvoice_triton.cli.offline_inference import main

if __name__ == "__main__":
    sys.exit(main())
