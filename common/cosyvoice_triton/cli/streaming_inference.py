"""Stream given speech tokens through token2wav: what the chunks cost, for new voices and for voices it knows.

    cosyvoice-triton streaming --strategy equal
    cosyvoice-triton streaming --strategy exponential --model-dir models/demo/CosyVoice2-0.5B \\
        --batch-size 4 --manifest-path manifest.jsonl --tokens-path out/offline/samples.jsonl

`equal` uses hops of 25 tokens (one second), `exponential` hops of 25, 50, 100, 100, ..., doubling like the server's.
The UNet flow's chunks end on 25-token boundaries counted from the start of the prompt.

The samples are those of `cosyvoice-triton token2wav`. The folder gets <id>.wav and streaming-<strategy>.json.

Figures: in the first pass the voices are new to the flow, in the second it has their prompt caches. A forward call
renders the chunks that wait at that time, of up to --batch-size streams, as on a server. First chunk: from a stream's
start to its first audio; encoding the recordings is not included.
"""

import argparse
from collections.abc import Sequence

from cosyvoice_triton.arguments import command_parser, positive_int, reporting_errors
from cosyvoice_triton.cli.token2wav import add_token2wav_arguments, run


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    return run(parse_args(argv))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add_token2wav_arguments(parser)
    parser.add_argument("--strategy", choices=("equal", "exponential"), default="equal", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive_int, default=1, help="concurrent streams")
    args = parser.parse_args(argv)
    return argparse.Namespace(**vars(args), streaming=True, warmup=2, figures=f"streaming-{args.strategy}.json")
