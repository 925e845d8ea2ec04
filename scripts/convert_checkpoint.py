"""Upstream's name of `cosyvoice-triton convert-checkpoint`."""

import sys

from cosyvoice_triton.cli.convert_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
