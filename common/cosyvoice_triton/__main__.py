"""`python -m cosyvoice_triton` is the command `cosyvoice-triton`."""

import sys

from cosyvoice_triton.cli import main

sys.exit(main())
