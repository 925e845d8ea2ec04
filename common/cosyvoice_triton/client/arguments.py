"""The options that all clients share, with upstream's names."""

import argparse
from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import positive_number
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.utterance import Parameters, Utterance, of_recording, read_reference
from cosyvoice_triton.text.pronunciation import read_pronunciations


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all clients, with upstream's names."""
    add_voice_arguments(parser)
    parser.add_argument("--output-audio", type=Path, default=Path("output.wav"), help="24 kHz, 16-bit WAV")


def add_voice_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the text, the voice, the model and request parameters."""
    add = parser.add_argument
    add("--target-text", help="the text to speak")
    add("--reference-audio", type=Path, help="the voice: any rate and channel count, 0.5 to 30 s")
    add("--reference-text", help="transcript of the reference audio; without it: cross-lingual cloning")
    add("--speaker", help="a registered voice, instead of --reference-audio")
    add("--instruct-text", help='how to speak, e.g. "Speak slowly."; beside --reference-text: CosyVoice3 only')
    add("--cross-lingual", action="store_true", help="keep a --speaker's timbre but not their language")
    add("--language", help="of the text: zh, en, ja, ko, de, fr, es, it, ru; without it: guessed")
    default, others = stacks.DEFAULT.orchestrator, stacks.orchestrators()[1:]
    add("--model-name", default=default, help=" or ".join([f"{default} (default)", *others]))
    add("--seed", type=int, help="makes the speech tokens reproducible")
    add(
        "--parameter",
        type=parameter,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another request parameter, e.g. sampling=triton or max_tokens=250; may be repeated",
    )
    add("--timeout", type=positive_number, default=120.0, help="seconds until the answer must be complete")


def request_parameters(args: argparse.Namespace) -> Parameters:
    """Return the request parameters of a command line, see `add_voice_arguments`."""
    named = {"seed": args.seed, "cross_lingual": args.cross_lingual or None, "language": args.language}
    return {name: value for name, value in named.items() if value is not None} | dict(args.parameter)


def parameter(text: str) -> tuple[str, int | str | bool]:
    """Parse a request parameter of a command line, NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        return name, int(value)
    except ValueError:
        return name, value  # also fractions: Triton 2.51 has no float parameters, so the server parses text


def words(path: str) -> dict[str, str]:
    """Read a file with a dictionary of words and readings."""
    try:
        return read_pronunciations(Path(path))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def utterance_of(args: argparse.Namespace) -> Utterance:
    """Return the request of a command line, see `add_voice_arguments`.

    Raise ClientError if there is no text, the recording cannot be read or a value cannot be sent.
    """
    if args.target_text is None:
        raise ClientError("no text to speak: add --target-text")
    recording = None if args.reference_audio is None else read_reference(args.reference_audio)
    try:
        return Utterance(
            target_text=args.target_text,
            **of_recording(recording),
            reference_text=args.reference_text or None,
            parameters=request_parameters(args),
            speaker=args.speaker or None,
            instruct_text=args.instruct_text or None,
        )
    except ValueError as error:
        raise ClientError(str(error)) from None
