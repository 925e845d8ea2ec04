"""Upstream's name of `cosyvoice-triton fill-template`."""

import sys

from cosyvoice_triton.cli.fill_template import main

if __name__ == "__main__":
    sys.exit(main())
