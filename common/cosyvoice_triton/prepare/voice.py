"""Write registered voices, from recordings that are encoded once."""

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.constants import MAX_TRANSCRIPT_CHARS
from cosyvoice_triton.llm.interface import LLMPrompt
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.text.cleaning import clean_transcript, stored_transcript
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.files import is_voice_name, save_pronunciation, save_voice, write_spk2info
from cosyvoice_triton.voice.judgement import judge
from cosyvoice_triton.voice.mix import Mix
from cosyvoice_triton.voice.prompt import Recording, validate_loudness
from cosyvoice_triton.voice.recordings import parse_recording
from cosyvoice_triton.voice.rights import Rights


def add_voice(
    options: StackOptions,
    name: str,
    audio: Path,
    text: str,
    replace: bool = False,
    pronunciation: Mapping[str, str] | None = None,
    trim: bool = False,
    consent: str = "",
    instruct_text: str = "",
    loudness: float | None = None,
) -> Path:
    """Encode the recording `audio` with the transcript `text` and write the voice and its dictionary; return its file.

    consent: as in `Rights`. instruct_text, loudness: how the voice speaks, unless a request says how. trim: see
    `Judgement.mended`.

    ValueError if the name, the recording or the text is invalid, with the server's messages.
    """
    if not is_voice_name(name):
        raise ValueError(f"{name!r} cannot be a voice's name: no slashes, no leading dot, not `pronunciation`")
    destination = options.voices_dir / f"{name}.safetensors"
    if destination.exists() and not replace:
        raise ValueError(f"{destination} exists; choose another name, or give --replace")
    rights, loudness = Rights.now(consent), validate_loudness(loudness)
    text = stored_transcript(instruct_text, text) if instruct_text.strip() else text
    instruction, text = clean_transcript(text, name="reference_text", max_chars=MAX_TRANSCRIPT_CHARS)
    try:
        recording = dataclasses.replace(parse_recording(audio.read_bytes()), text=text, instruction=instruction)
    except ValueError as error:
        raise ValueError(f"{audio}: {error}") from None
    print(f"[1/2] {audio}: {recording.seconds:.1f} s, encoding it with {options.checkpoint_dir}", flush=True)
    judgement = judge(recording)
    for warning in judgement.warnings:
        print(f"      warning: {warning}", file=sys.stderr, flush=True)
    if trim:
        print("      trimmed", flush=True)
        recording = judgement.mended(recording)
    begun = time.monotonic()
    prompt = ReferenceEncoder(stacks.named(options.stack), options.checkpoint_dir)(recording)
    print(f"      {len(prompt.tokens)} speech tokens after {time.monotonic() - begun:.1f} s", flush=True)
    save_voice(destination, dataclasses.replace(prompt, rate=recording.rate, loudness=loudness), rights)
    save_pronunciation(options.voices_dir, name, pronunciation or {})
    print(f"[2/2] written to {destination}; use it as speaker '{name}'")
    return destination


def export_spk2info(options: StackOptions, name: str, path: Path) -> Path:
    """Add a registered voice to the spk2info.pt at `path`, encoded for the stack; return its path.

    ValueError if there is no such voice, it is a mix, or the LLM's directory has no tokenizer.
    """
    stack = stacks.named(options.stack)
    tokenizer = LLMTokenizer.from_dir(options.tokenizer_dir, stack.llm.tokenizer)
    voice = VoiceBook(options.voices_dir, options.checkpoint_dir, tokenizer.decode).get(name)
    if isinstance(voice, Mix):
        raise ValueError(f"the voice {name!r} is a mix, which upstream does not know")
    prompt = ReferenceEncoder(stack, options.checkpoint_dir)(voice) if isinstance(voice, Recording) else voice
    system, text = tokenizer.prompt_ids(LLMPrompt("", prompt.text, instruction=prompt.instruction))
    write_spk2info(path, name, prompt, [*system, *text])
    return path
