"""The command `cosyvoice-triton`: one module for each subcommand, with a parser and a `main`."""

import importlib
import sys
from collections.abc import Sequence

# Subcommand: module below this package, and what it does.
COMMANDS = {
    "demo": ("demo", "start a stack with the demo voice, speak one text, write a wav file"),
    "serve": ("serve", "serve a rendered repository until Ctrl-C"),
    "render": ("render", "write the Triton model repository of a stack"),
    "prepare": ("prepare", "download checkpoints, build the LLM's engine"),
    "voice": ("add_voice", "register a voice under a name"),
    "bench": ("benchmark", "measure a server under load"),
    "speech": ("speech_server", "run the speech service alone, in front of one or several Tritons"),
    "wait": ("wait_ready", "wait until health pages answer 200"),
    "client-grpc": ("client_grpc", "streaming and offline client over gRPC, with upstream's options"),
    "client-http": ("client_http", "offline client over HTTP, with upstream's options"),
    "fill-template": ("fill_template", "fill in one config.pbtxt"),
    "convert-llm": ("convert_llm", "make a HuggingFace directory of an official llm.pt"),
    "convert-genai": ("convert_genai", "convert a HuggingFace LLM for the CPU engine"),
    "convert-checkpoint": ("convert_checkpoint", "convert a HuggingFace LLM for TensorRT-LLM"),
    "test-llm": ("test_llm", "send one prompt through any LLM engine or server"),
    "offline": ("offline_inference", "turn texts into audio files without a server"),
    "token2wav": ("token2wav", "turn speech tokens into audio files without a server"),
    "streaming": ("streaming_inference", "run token2wav in chunks without a server"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that is named first; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: cosyvoice-triton COMMAND [OPTION ...]\n")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:20}{summary}")
        print("\n`cosyvoice-triton COMMAND --help` prints a command's options.")
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"unknown command {arguments[0]!r}; `cosyvoice-triton --help` lists them", file=sys.stderr)
        return 2
    module = importlib.import_module(f"cosyvoice_triton.cli.{COMMANDS[arguments[0]][0]}")
    sys.argv = [f"cosyvoice-triton {arguments[0]}", *arguments[1:]]
    return module.main(arguments[1:])
