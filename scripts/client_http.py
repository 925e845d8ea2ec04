"""Upstream's name of `cosyvoice-triton client-http`."""

import sys

from cosyvoice_triton.cli.client_http import main

if __name__ == "__main__":
    sys.exit(main())
