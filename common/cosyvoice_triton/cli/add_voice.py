"""Register a voice under a name, so that requests send `speaker` instead of a recording (`reference_wav`).

    cosyvoice-triton voice models/official anna --reference-audio anna.wav \\
        --reference-text "Exactly what she says in the recording."

The recording is encoded once, now, and written to MODELS/voices/NAME.safetensors. A running server reads the file when
a request names the voice; no restart is needed. The best recordings are 5 to 10 seconds of one speaker without music,
noise or echo. Without --reference-text the LLM gets no prompt: the timbre is kept, the manner of speaking is not.

Alternatively, copy NAME.wav and its transcript as NAME.txt to the same folder: the server then encodes the recording
itself, each stack with its own networks. To remove a voice, delete its file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.prepare.voice import add_voice
from cosyvoice_triton.server.rendering import StackOptions


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models_dir", type=Path, help="directory with the checkpoints, from which the stack was rendered"
    )
    parser.add_argument("name", help="name of the voice in requests: letters of any script, digits, spaces, -_.")
    parser.add_argument(
        "--reference-audio", type=Path, required=True, help="any sample rate and channel count, 0.5 to 30 s"
    )
    parser.add_argument("--reference-text", default="", help="transcript of the recording, word for word")
    parser.add_argument(
        "--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help="stack whose networks encode it"
    )
    parser.add_argument("--replace", action="store_true", help="overwrite an existing voice")
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
