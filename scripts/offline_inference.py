"""Text to speech without a server: a data set or a manifest through LLM and vocoder, to a folder of audio files.

    python -m scripts.offline_inference --output-dir out/offline
    python -m scripts.offline_inference --output-dir out/unet --backend onnxruntime_genai --batch-size 4 \\
        --token2wav-batch-size 4 --token2wav-path models/demo/CosyVoice2-0.5B --manifest-path my/manifest.jsonl
    python -m scripts.offline_inference --output-dir out/offline --backend trtllm-serve --batch-size 16 \\
        --openai-api-base http://localhost:8000/v1 --openai-model-name cosyvoice2_llm

The backends: `hf` is transformers' generate (any device, slow); `onnxruntime_genai` is this project's CPU engine, over
what scripts/convert_genai.py has made; `trtllm` and `vllm` are engines of this process on a GPU; `trtllm-serve` is any
server with OpenAI's interface. The vocoder is the one whose checkpoint --token2wav-path is. Texts are prepared as the
server prepares them: numbers in words, long texts in segments.

The folder gets <id>.wav, samples.jsonl (with the speech tokens, for scripts/token2wav.py and
scripts/streaming_inference.py) and log.txt, the figures as JSON. Samples that are there already, made from the same
text, recording and settings, are kept: after an interruption the same command goes on. A sample that fails is named
here and in log.txt, the others go on, and the exit code is 1.

The figures: stages take turns, so each one's time is its own; the total is from the first sample's preparation to the
last file. Reading the data, loading the models and a warm-up come before and are not in it. RTF is seconds of work for
a second of the audio that this run made.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from common import stacks
from common.llm.interface import Sampling
from tools.arguments import positive_int
from tools.offline.inference import run
from tools.offline.inputs import add_data_arguments
from tools.offline.llm import BACKENDS
from tools.offline.tool import exit_code


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    resume = "interrupted; what is finished is kept, the same command goes on"
    return exit_code("offline_inference", lambda: run(args), resume)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to or to go on in")
    add_data_arguments(parser, "--split-name")
    demo = Path("models/demo")
    parser.add_argument(
        "--llm-model-name-or-path",
        type=Path,
        default=demo / stacks.DEFAULT.llm.directory,
        help="HuggingFace directory of the LLM; its tokenizer is always read (default: %(default)s)",
    )
    parser.add_argument(
        "--token2wav-path",
        type=Path,
        default=demo / stacks.DEFAULT.checkpoint,
        help="checkpoint of either vocoder (default: %(default)s)",
    )
    parser.add_argument("--prompt-speech-path", type=Path, help="one voice for all samples instead of their own")
    parser.add_argument("--prompt-text", help="what that recording says; without it: cross-lingual cloning")
    parser.add_argument("--backend", choices=BACKENDS, default="hf", help="what runs the LLM (default: %(default)s)")
    parser.add_argument("--engine-dir", type=Path, help="what trtllm or onnxruntime_genai loads")
    parser.add_argument("--batch-size", type=positive_int, default=1, help="samples at once in the LLM")
    parser.add_argument(
        "--token2wav-batch-size", type=positive_int, default=1, help="utterances at once in the vocoder"
    )
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--top-p", type=float, default=Sampling.top_p)
    parser.add_argument("--top-k", type=int, default=Sampling.top_k)
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same audio (default: 0)")
    parser.add_argument("--openai-api-base", default="http://localhost:8000/v1", help="of trtllm-serve")
    engine = stacks.DEFAULT.llm.engine
    parser.add_argument("--openai-model-name", default=engine, help="the LLM's name at trtllm-serve")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of hf and the vocoder"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
