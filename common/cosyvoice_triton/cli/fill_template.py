"""Fill in one config.pbtxt template, with upstream's command line.

    cosyvoice-triton fill-template -i model_repo/token2wav/config.pbtxt model_dir:DIR,triton_max_batch_size:16

Without -i the result is printed. The first colon ends the key, so a value may be a URL; a comma in a value is written
as \\, and a colon in a key as \\:. Keys that are not given take their default, if they have one; those about the LLM
are upstream's: cosyvoice2_dit and cosyvoice3 ask trtllm-serve at http://localhost:8000/v1, cosyvoice2 the C++ backend
in the same Triton. For another LLM give llm_transport, llm_urls and llm_model, or llm_backend.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.server.rendering import FIXED, fill, model_name


def parse_substitutions(argument: str) -> dict[str, str]:
    """Return `key:value,key:value` as a dict. Raise ValueError naming a part that is not a pair, or a repeated key."""
    pairs: dict[str, str] = {}
    for part in re.split(r"(?<!\\),", argument):
        if not part:
            continue
        key, *value = re.split(r"(?<!\\):", part, maxsplit=1)
        if not value:
            raise ValueError(f"{part!r} is not key:value; a comma within a value is written as \\,")
        key, text = (re.sub(r"\\([,:])", r"\1", item) for item in (key, value[0]))
        if key in pairs:
            raise ValueError(f"key {key!r} is given twice")
        pairs[key] = text
    return pairs


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("file_path", type=Path, help="the template")
    parser.add_argument("substitutions", help="key:value,key:value")
    parser.add_argument("-i", "--in_place", action="store_true", help="write the result back to the file")
    args = parser.parse_args(argv)
    try:
        template, given = args.file_path.read_text(), parse_substitutions(args.substitutions)
        filled = fill(template, given)
    except ValueError as error:  # stages fill several templates, one after another
        raise ValueError(f"{args.file_path}: {error}") from None
    for key, value in FIXED.get(model_name(template), {}).items():
        if key in given and given[key].lower() != value:
            print(f"{args.file_path}: {key}:{given[key]} has no effect, it is always {value}", file=sys.stderr)
    if args.in_place:
        args.file_path.write_text(filled)
    else:
        print(filled, end="")
    return 0
