"""`python -m common.speech_service`."""

import sys

from common.speech_service.command import main

if __name__ == "__main__":
    sys.exit(main())
