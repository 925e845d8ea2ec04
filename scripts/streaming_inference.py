"""The vocoder chunk by chunk on tokens that are all there: its cost, and how its audio differs from speech at once.

    python -m scripts.streaming_inference --strategy equal
    python -m scripts.streaming_inference --strategy exponential --model-dir models/demo/CosyVoice2-0.5B \\
        --batch-size 4 --manifest-path tests/assets/manifest.jsonl --tokens-path out/offline/samples.jsonl

`equal` cuts after every 25 tokens (a second), `exponential` after 25, 50, 100, 100, ..., as the server's hops double
from its first one on. The UNet flow's chunks end on 25-token boundaries counted from the prompt's start.

The speech tokens are a data set's column target_audio_cosy2_tokens, or of the same name in the file of --tokens-path,
which scripts/offline_inference.py writes as samples.jsonl. A sample without any says its own recording again.

The folder gets <id>.wav (streamed), offline/<id>.wav (at once), streaming-<strategy>.json, and streaming-<strategy>.png
of the sample whose two mels differ most. The two are not equal by design: a chunk does not hear what comes after it.

The figures: one pass with voices that nobody has spoken in yet (recording to prompt, and the flow's caches of it), one
with the same voices again. A forward call renders one chunk of each stream of a batch. First chunk: from the prompts of
a batch to its first audio; where voices are new, that includes the flow's caches of them and not the prompts' making.
"""

import argparse
import sys
from collections.abc import Sequence

from tools.arguments import positive_int
from tools.offline.inputs import add_token2wav_arguments
from tools.offline.streaming import run
from tools.offline.tool import exit_code


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code("streaming_inference", lambda: run(args))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_token2wav_arguments(parser)
    parser.add_argument("--strategy", choices=("equal", "exponential"), default="equal", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive_int, default=1, help="streams at once")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
