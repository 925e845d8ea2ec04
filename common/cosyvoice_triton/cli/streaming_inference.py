"""Stream given speech tokens through token2wav: its cost, and how the audio differs from offline rendering.

    cosyvoice-triton streaming --strategy equal
    cosyvoice-triton streaming --strategy exponential --model-dir models/demo/CosyVoice2-0.5B \\
        --batch-size 4 --manifest-path manifest.jsonl --tokens-path out/offline/samples.jsonl

`equal` uses hops of 25 tokens (one second), `exponential` hops of 25, 50, 100, 100, ..., doubling like the server's.
The UNet flow's chunks end on 25-token boundaries counted from the start of the prompt.

The speech tokens come from the data set's column target_audio_cosy2_tokens, or from the same field in the file
--tokens-path, which `cosyvoice-triton offline` writes as samples.jsonl. A sample without tokens resynthesizes its own
recording.

The folder gets <id>.wav (streamed), offline/<id>.wav (rendered at once) and streaming-<strategy>.json. They differ by
design: a chunk has no right context beyond the look-ahead.

Figures: the first pass uses new voices (it encodes the recordings and fills the flow's prompt caches), the second pass
the same voices again. A forward call renders one chunk of each stream of a batch. First chunk: from the prompts of a
batch to its first audio; for new voices it includes filling the prompt caches, but not encoding the recordings.
"""

import argparse
import sys
from collections.abc import Sequence

from cosyvoice_triton.cli.arguments import positive_int
from cosyvoice_triton.offline.inputs import add_token2wav_arguments
from cosyvoice_triton.offline.streaming import run
from cosyvoice_triton.offline.tool import exit_code


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code("streaming_inference", lambda: run(args))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_token2wav_arguments(parser)
    parser.add_argument("--strategy", choices=("equal", "exponential"), default="equal", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive_int, default=1, help="concurrent streams")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
