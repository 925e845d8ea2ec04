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
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import stacks
from common.constants import MAX_TRANSCRIPT_CHARS, PROMPT_SAMPLE_RATE
from common.server.rendering import StackOptions
from common.text import clean_line
from common.voice.audio import load_reference
from common.voice.encoders import ReferenceEncoder
from common.voice.files import is_voice_name, save_voice


def add_voice(options: StackOptions, name: str, audio: Path, text: str, replace: bool = False) -> Path:
    """Encode the recording `audio`, which says `text`, and write the voice; returns its file.

    ValueError naming what is wrong with the name, the recording or the text, in the server's own words.
    """
    if not is_voice_name(name):
        raise ValueError(f"{name!r} cannot be a voice's name: it is that of a file, so no slashes and no leading dot")
    destination = options.voices_dir / f"{name}.safetensors"
    if destination.exists() and not replace:
        raise ValueError(f"{destination} exists; choose another name, or give --replace")
    text = clean_line(text, name="reference_text", max_chars=MAX_TRANSCRIPT_CHARS)
    wav = load_reference(audio)
    print(
        f"[1/2] {audio}: {len(wav) / PROMPT_SAMPLE_RATE:.1f} s, encoding it with {options.checkpoint_dir}", flush=True
    )
    begun = time.monotonic()
    prompt = ReferenceEncoder(options.checkpoint_dir)(wav)
    print(f"      {len(prompt.tokens)} speech tokens after {time.monotonic() - begun:.1f} s", flush=True)
    save_voice(destination, dataclasses.replace(prompt, text=text))
    print(f"[2/2] written to {destination}; ask for it as speaker '{name}'")
    return destination


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
