"""Upstream's name of `cosyvoice-triton token2wav`."""

import sys

from cosyvoice_triton.cli.token2wav import main

if __name__ == "__main__":
    sys.exit(main())
