"""Register voices, so that requests send a name (`speaker`) instead of a recording (`reference_wav`).

    cosyvoice-triton voice add models/official anna --reference-audio anna.wav \\
        --reference-text "Exactly what she says in the recording."
    cosyvoice-triton voice list models/official
    cosyvoice-triton voice export models/official anna
    cosyvoice-triton voice import models/other anna.zip
    cosyvoice-triton voice export models/official anna --format spk2info   for upstream's code
    cosyvoice-triton voice delete models/official anna

`add` encodes the recording once, now, and writes MODELS/voices/NAME.safetensors. A running server reads the file when a
request names the voice; no restart is needed. The best recordings are 5 to 10 seconds of one speaker without music,
noise or echo. Without --reference-text the LLM gets no prompt: the timbre is kept, the manner of speaking is not.

Alternatively, copy NAME.wav and its transcript as NAME.txt to the same folder: the server then encodes the recording
itself, each stack with its own networks.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.client.arguments import words
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.response_cache import empty_redis
from cosyvoice_triton.voice.book import SPK2INFO, VoiceBook
from cosyvoice_triton.voice.bundle import export_voice, read_bundle
from cosyvoice_triton.voice.files import delete_voice, is_voice_name, register_voice
from cosyvoice_triton.voice.rights import Rights


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="encode a recording")
    listed = actions.add_parser("list", help="print the names of the voices")
    delete = actions.add_parser("delete", help="delete a voice's files")
    export = actions.add_parser("export", help="write a voice, its dictionary and its consent to one file")
    imported = actions.add_parser("import", help="register a voice that was exported here or over HTTP")
    for action in (add, listed, delete, export, imported):
        action.add_argument("models_dir", type=Path, help="directory of the checkpoints, with the folder voices")
        action.add_argument(
            "--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help="stack whose networks encode it"
        )
    for action in (add, delete, export):
        action.add_argument("name", help="name of the voice in requests: letters of any script, digits, spaces, -_.")
    delete.add_argument("--redis", metavar="HOST:PORT", help="also empty this response cache of the servers")
    export.add_argument("--output", type=Path, help="default: NAME.zip, or spk2info.pt, to which the voice is added")
    export.add_argument(
        "--format",
        choices=("bundle", "spk2info"),
        default="bundle",
        help="bundle (default): for `import`; spk2info: what upstream's save_spkinfo writes",
    )
    imported.add_argument("file", type=Path)
    imported.add_argument("--name", help="instead of its own")
    listed.add_argument("--jsonl", action="store_true", help="an object for each, with its consent and age")
    add.add_argument(
        "--reference-audio", type=Path, required=True, help="any sample rate and channel count, 0.5 to 30 s"
    )
    add.add_argument("--reference-text", default="", help="transcript of the recording, word for word")
    add.add_argument("--instruct-text", default="", help="how the voice speaks, unless a request says how")
    add.add_argument("--loudness", type=float, metavar="LUFS", help="of its answers over HTTP, unless a request says")
    add.add_argument("--pronunciation", type=words, metavar="FILE", help="words that the voice pronounces differently")
    add.add_argument("--consent", default="", help="the speaker's consent, or where it is kept; stored with the voice")
    add.add_argument("--trim", action="store_true", help="cut the silence at its ends to 0.2 s, mend an abrupt end")
    add.add_argument("--replace", action="store_true", help="overwrite an existing voice")
    return parser


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if not args.models_dir.is_dir():
        raise ValueError(f"there is no folder {args.models_dir}: give that of the checkpoints, such as models/demo")
    options = StackOptions(models_dir=args.models_dir, stack=args.stack)
    if args.action == "add":
        from cosyvoice_triton.prepare.voice import add_voice  # imports torch, which takes a second

        source = args.reference_audio, args.reference_text
        kept = args.replace, args.pronunciation, args.trim, args.consent, args.instruct_text, args.loudness
        add_voice(options, args.name, *source, *kept)
        return 0
    book = VoiceBook(options.voices_dir, options.checkpoint_dir, str)
    if args.action == "delete":
        delete_voice(options.voices_dir, args.name)
        if args.redis:
            empty_redis(args.redis)
    elif args.action == "export" and args.format == "spk2info":
        from cosyvoice_triton.prepare.voice import export_spk2info

        print(f"written to {export_spk2info(options, args.name, args.output or Path(SPK2INFO))}")
    elif args.action == "export":
        output = args.output or Path(f"{args.name}.zip")
        output.write_bytes(export_voice(options.voices_dir, book, args.name))
        print(f"written to {output}")
    elif args.action == "import":
        found = read_bundle(args.file.read_bytes())
        if not is_voice_name(name := args.name or found.name) or name in book.names():
            raise ValueError(f"{name!r} is a voice already, or cannot be one's name: give another --name")
        register_voice(options.voices_dir, name, found.voice, found.words, Rights.now(found.consent))
        print(f"registered; use it as speaker '{name}'")
    else:
        for name in book.names():
            print(json.dumps({"name": name, **book.rights(name).known}, ensure_ascii=False) if args.jsonl else name)
    return 0
