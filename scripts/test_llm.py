"""Upstream's name of `cosyvoice-triton test-llm`."""

import sys

from cosyvoice_triton.cli.test_llm import main

if __name__ == "__main__":
    sys.exit(main())
