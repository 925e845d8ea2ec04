"""The command `cosyvoice-triton`: one module for each subcommand, with a parser and a `main`."""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand.

    module: has `main(argv)`. summary: a line of the help. actions: subcommands of its own, instead of a module. Those
    of `prepare` that are options of one parser have the same module, which then reads the action's name, too.
    """

    module: str
    summary: str
    actions: "Mapping[str, Command]" = {}


_PREPARE = "cosyvoice_triton.cli.prepare"
# By what a user wants to do.
COMMANDS: dict[str, dict[str, Command]] = {
    "speak": {
        "demo": Command("cosyvoice_triton.cli.demo", "serve the demo voice, speak one text, write a wav file, stop"),
        "text": Command("cosyvoice_triton.cli.text", "print what will be spoken of a text, segment by segment"),
        "say": Command("cosyvoice_triton.cli.say", "speak a text at a running server, or in this process, to a file"),
    },
    "serve": {
        "serve": Command("cosyvoice_triton.cli.serve", "serve a stack until Ctrl-C"),
        "doctor": Command("cosyvoice_triton.cli.doctor", "check this machine, say what it would serve"),
        "render": Command("cosyvoice_triton.cli.render", "write the Triton model repository of a stack"),
        "speech": Command("cosyvoice_triton.speech_service.command", "run the speech service alone, before Tritons"),
        "wait": Command("cosyvoice_triton.cli.wait_ready", "wait until health pages answer 200"),
    },
    "checkpoints and voices": {
        "prepare": Command(
            "",
            "download checkpoints, convert them, build engines",
            {
                "demo": Command(_PREPARE, "write the small trained checkpoint of the demo"),
                "download": Command(_PREPARE, "download the official checkpoints of a stack"),
                "engine": Command(_PREPARE, "build the files that the LLM's engine loads"),
                "plans": Command(_PREPARE, "build token2wav's TensorRT plans"),
                "convert-llm": Command("cosyvoice_triton.cli.convert_llm", "official llm.pt -> HuggingFace directory"),
                "convert-checkpoint": Command(
                    "cosyvoice_triton.cli.convert_checkpoint", "HuggingFace directory -> TensorRT-LLM checkpoint"
                ),
            },
        ),
        "voice": Command("cosyvoice_triton.cli.voice", "register, list, delete, export and import voices"),
        "export": Command(
            "",
            "write a checkpoint's networks for other runtimes",
            {
                "onnx": Command("cosyvoice_triton.export.onnx", "export them to ONNX files"),
            },
        ),
    },
    "measure": {
        "evaluate": Command("cosyvoice_triton.cli.evaluate", "judge a checkpoint's speech: words, quality, similarity"),
        "bench": Command(
            "",
            "measure a server",
            {
                "load": Command("cosyvoice_triton.bench.load", "a running server under load, with listeners"),
            },
        ),
    },
    "programs of upstream, with its options": {
        "client-grpc": Command("cosyvoice_triton.cli.client_grpc", "streaming and offline client over gRPC"),
        "client-http": Command("cosyvoice_triton.cli.client_http", "offline client over HTTP"),
        "fill-template": Command("cosyvoice_triton.cli.fill_template", "fill in one config.pbtxt"),
        "test-llm": Command(
            "cosyvoice_triton.cli.test_llm", "send prompts through any LLM engine or server, and time them"
        ),
        "offline": Command("cosyvoice_triton.cli.offline_inference", "texts -> audio files, without a server"),
        "token2wav": Command("cosyvoice_triton.cli.token2wav", "speech tokens -> audio files, without a server"),
        "streaming": Command("cosyvoice_triton.cli.streaming_inference", "the same in chunks, and their cost"),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that is named first; return its exit code."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of transformers, too
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(importlib.metadata.version("cosyvoice-triton"))
        return 0
    try:
        return _run("cosyvoice-triton", COMMANDS, arguments)
    except KeyboardInterrupt:  # of a command that is still importing what it needs
        print("interrupted", file=sys.stderr)
        return 130


def _run(program: str, groups: Mapping[str, Mapping[str, Command]], arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(program, groups), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    command = {name: command for group in groups.values() for name, command in group.items()}.get(name)
    if command is None:
        print(f"error: unknown command {name!r}; `{program} --help` lists them", file=sys.stderr)
        return 2
    if command.actions:
        return _run(f"{program} {name}", {"": command.actions}, rest)
    own = command.module == _PREPARE  # its parser reads the action
    sys.argv = [program if own else f"{program} {name}", *(arguments if own else rest)]
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:  # of an extra that is not installed
        print(f"error: {error}; run: pip install 'cosyvoice-triton[server,client,http]'", file=sys.stderr)
        return 1
    return int(module.main(sys.argv[1:]))


def _help(program: str, groups: Mapping[str, Mapping[str, Command]]) -> str:
    lines = [f"usage: {program} COMMAND [OPTION ...]"]
    for title, commands in groups.items():
        lines += ["", f"{title}:" if title else "commands:"]
        for name, command in commands.items():
            actions = f" ({', '.join(command.actions)})" if command.actions else ""
            lines.append(f"  {name:20}{command.summary}{actions}")
    version = "; --version prints the version" if groups is COMMANDS else ""
    return "\n".join([*lines, "", f"`{program} COMMAND --help` explains a command, with examples{version}."])
