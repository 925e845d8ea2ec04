"""Write registered voices, from recordings that are encoded once."""

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.constants import MAX_TRANSCRIPT_CHARS
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.text import clean_line
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.files import is_voice_name, save_pronunciation, save_voice
from cosyvoice_triton.voice.judgement import judge
from cosyvoice_triton.voice.recordings import parse_recording
from cosyvoice_triton.voice.rights import Rights


def add_voice(
    options: StackOptions,
    name: str,
    audio: Path,
    text: str,
    replace: bool = False,
    pronunciation: Mapping[str, str] | None = None,
    trim: bool = True,
    consent: str = "",
) -> Path:
    """Encode the recording `audio` with the transcript `text` and write the voice and its dictionary; return its file.

    consent: as in `Rights`. trim: see `Judgement.mended`.

    ValueError if the name, the recording or the text is invalid, with the server's messages.
    """
    if not is_voice_name(name):
        raise ValueError(f"{name!r} cannot be a voice's name: no slashes, no leading dot, not `pronunciation`")
    destination = options.voices_dir / f"{name}.safetensors"
    if destination.exists() and not replace:
        raise ValueError(f"{destination} exists; choose another name, or give --replace")
    rights = Rights.now(consent)
    text = clean_line(text, name="reference_text", max_chars=MAX_TRANSCRIPT_CHARS)
    try:
        recording = dataclasses.replace(parse_recording(audio.read_bytes()), text=text)
    except ValueError as error:
        raise ValueError(f"{audio}: {error}") from None
    print(f"[1/2] {audio}: {recording.seconds:.1f} s, encoding it with {options.checkpoint_dir}", flush=True)
    judgement = judge(recording)
    for warning in judgement.warnings:
        print(f"      warning: {warning}", file=sys.stderr, flush=True)
    if trim:
        recording = judgement.mended(recording)
    begun = time.monotonic()
    prompt = ReferenceEncoder(stacks.named(options.stack), options.checkpoint_dir)(recording)
    print(f"      {len(prompt.tokens)} speech tokens after {time.monotonic() - begun:.1f} s", flush=True)
    save_voice(destination, dataclasses.replace(prompt, rate=recording.rate), rights)
    save_pronunciation(options.voices_dir, name, pronunciation or {})
    print(f"[2/2] written to {destination}; use it as speaker '{name}'")
    return destination
