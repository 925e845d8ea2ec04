"""Register a voice under a name, so that requests need no recording: `speaker` instead of `reference_wav`.

    python -m scripts.add_voice models/official anna --reference-audio anna.wav \\
        --reference-text "Exactly what she says in the recording."

The recording is encoded once, here, and written to MODELS/voices/NAME.safetensors, where a running server finds it
with the next request that names it; nothing has to be restarted. The best recordings hold 5 to 10 seconds of one person
speaking, without music, noise or echo. Without --reference-text the voice speaks as a stranger to the LLM: the timbre
stays, the manner of speaking does not.

Instead of running this, NAME.wav and its text in NAME.txt can be copied to the same folder: then the server encodes
the recording itself, and each stack by its own networks. To take a voice away, remove its file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common import stacks
from common.server.rendering import StackOptions
from tools.prepare.voice import add_voice


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models_dir", type=Path, help="the directory that the stack is rendered from")
    parser.add_argument("name", help="what requests call the voice: letters of any script, digits, blanks, -_.")
    parser.add_argument("--reference-audio", type=Path, required=True, help="any rate and channel count, 0.5 to 30 s")
    parser.add_argument("--reference-text", default="", help="what it says, word for word")
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help="whose networks encode it")
    parser.add_argument("--replace", action="store_true", help="overwrite a voice of this name")
    args = parser.parse_args(argv)
    try:
        options = StackOptions(models_dir=args.models_dir, stack=args.stack)
        add_voice(options, args.name, args.reference_audio, args.reference_text, args.replace)
    except (ValueError, RuntimeError, OSError) as error:  # soundfile's own errors are RuntimeErrors
        print(f"add_voice: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
