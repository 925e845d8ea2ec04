"""The command `cosyvoice-triton`: one module for each subcommand, with a parser and a `main`."""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand.

    summary: a line of the help. module: has `main(argv)`; without one it is that of the command's name in this folder.
    actions: subcommands of its own, instead of a module. Those of `prepare` that are options of one parser have the
    same module, which then reads the action's name, too.
    """

    summary: str
    module: str = ""
    actions: "Mapping[str, Command]" = {}


_PREPARE = f"{__name__}.prepare"
# By what a user wants to do.
COMMANDS: dict[str, dict[str, Command]] = {
    "speak": {
        "demo": Command("serve the demo voice, speak one text, write a wav file, stop"),
        "text": Command("print what will be spoken of a text, segment by segment"),
        "say": Command("speak a text at a running server, or in this process, to a file"),
        "book": Command("speak an EPUB at a running server, to an audiobook with chapters"),
    },
    "serve": {
        "serve": Command("serve a stack until Ctrl-C"),
        "doctor": Command("check this machine, say what it would serve"),
        "render": Command("write the Triton model repository of a stack"),
        "speech": Command("run the speech service alone, before Tritons", "cosyvoice_triton.speech_service.command"),
        "wait": Command("wait until health pages answer 200", f"{__name__}.wait_ready"),
    },
    "checkpoints and voices": {
        "prepare": Command(
            "download checkpoints, convert them, build engines",
            actions={
                "demo": Command("write the small trained checkpoint of the demo", _PREPARE),
                "download": Command("download the official checkpoints of a stack", _PREPARE),
                "engine": Command("build the files that the LLM's engine loads", _PREPARE),
                "plans": Command("build token2wav's TensorRT plans", _PREPARE),
                "convert-llm": Command("official llm.pt -> HuggingFace directory"),
                "convert-checkpoint": Command("HuggingFace directory -> TensorRT-LLM checkpoint"),
            },
        ),
        "voice": Command("register, list, delete, export and import voices"),
        "export": Command(
            "write a checkpoint's networks for other runtimes",
            actions={"onnx": Command("export them to ONNX files", "cosyvoice_triton.export.onnx")},
        ),
    },
    "measure": {
        "evaluate": Command("judge a checkpoint's speech: words, quality, similarity"),
        "bench": Command(
            "measure a server",
            actions={"load": Command("a running server under load, with listeners", "cosyvoice_triton.bench.load")},
        ),
    },
    "programs of upstream, with its options": {
        "client-grpc": Command("streaming and offline client over gRPC"),
        "client-http": Command("offline client over HTTP"),
        "fill-template": Command("fill in one config.pbtxt"),
        "test-llm": Command("send prompts through any LLM engine or server, and time them"),
        "offline": Command("texts -> audio files, without a server", f"{__name__}.offline_inference"),
        "token2wav": Command("speech tokens -> audio files, without a server"),
        "streaming": Command("the same in chunks, and their cost", f"{__name__}.streaming_inference"),
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
        module = importlib.import_module(command.module or f"{__name__}.{name.replace('-', '_')}")
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
