"""token2wav alone: speech tokens and a recording of the voice in, audio files and timings out.

    cosyvoice-triton token2wav --model-dir models/demo/CosyVoice2-0.5B
    cosyvoice-triton token2wav --tokens-path out/offline/samples.jsonl --batch-size 8 --warmup 3
    cosyvoice-triton token2wav --streaming --strategy exponential

Utterances are rendered whole in batches of --batch-size, or with --streaming in chunks as a streaming client gets them.

The speech tokens come from the data set's column target_audio_cosy2_tokens, or from the same field in the file
--tokens-path, which `cosyvoice-triton offline` writes as samples.jsonl. A sample without tokens resynthesizes its own
recording.

The folder gets <id>.wav and token2wav.json. The figures are those of the last of --warmup passes over the samples; each
pass encodes the voices again. Loading, the warm-up and writing files are not included.
"""

import argparse
from collections.abc import Sequence

from cosyvoice_triton.arguments import command_parser, positive_int, reporting_errors
from cosyvoice_triton.offline.token2wav import add_token2wav_arguments, run


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    return run(parse_args(argv))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add_token2wav_arguments(parser)
    parser.add_argument(
        "--batch-size", type=positive_int, default=4, help="utterances per batch (default: %(default)s)"
    )
    parser.add_argument("--warmup", type=positive_int, default=1, help="passes, the last of which is measured")
    parser.add_argument("--streaming", action="store_true", help="render in chunks instead of whole utterances")
    parser.add_argument("--strategy", choices=("equal", "exponential"), default="exponential", help="for --streaming")
    parser.set_defaults(figures="token2wav.json")
    return parser.parse_args(argv)
