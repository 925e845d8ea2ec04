"""The vocoder alone: speech tokens and a recording of the voice in, audio files and their cost out.

    python -m scripts.token2wav --model-dir models/demo/CosyVoice2-0.5B
    python -m scripts.token2wav --tokens-path out/offline/samples.jsonl --batch-size 8 --warmup 3
    python -m scripts.token2wav --streaming --strategy exponential

Utterances are rendered whole, --batch-size of them together, or with --streaming in the chunks that a listener would
get; scripts/streaming_inference.py compares the two.

The speech tokens are a data set's column target_audio_cosy2_tokens, or of the same name in the file of --tokens-path,
which scripts/offline_inference.py writes as samples.jsonl. A sample without any says its own recording again.

The folder gets <id>.wav and token2wav.json. The figures are of the last of --warmup passes over the samples, each with
voices made anew. Loading the networks and a warm-up come before the first one; writing files is not in them.
"""

import argparse
import sys
from collections.abc import Sequence

from tools.arguments import positive_int
from tools.offline.inputs import add_token2wav_arguments
from tools.offline.token2wav import run
from tools.offline.tool import exit_code


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code("token2wav", lambda: run(args))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_token2wav_arguments(parser)
    parser.add_argument("--batch-size", type=positive_int, default=4, help="utterances at once (default: %(default)s)")
    parser.add_argument("--warmup", type=positive_int, default=1, help="passes, of which the last is measured")
    parser.add_argument("--streaming", action="store_true", help="chunk by chunk instead of whole")
    parser.add_argument("--strategy", choices=("equal", "exponential"), default="exponential", help="of --streaming")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
