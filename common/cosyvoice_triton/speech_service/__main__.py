"""`python -m cosyvoice_triton.speech_service`."""

import sys

from cosyvoice_triton.speech_service.command import main

if __name__ == "__main__":
    sys.exit(main())
