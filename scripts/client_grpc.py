"""Upstream's name of `cosyvoice-triton client-grpc`."""

import sys

from cosyvoice_triton.cli.client_grpc import main

if __name__ == "__main__":
    sys.exit(main())
