"""Write the checkpoints of all stacks with random weights, in the official layout and formats.

    python -m tests.random_weights DEST                        small networks, which make noise of speech-like length
    python -m tests.random_weights DEST --weights random-full  the official sizes, for measuring speed: 6 GB

DEST/cosyvoice2_llm/               HuggingFace Qwen2ForCausalLM with CosyVoice2's speech tokens
DEST/CosyVoice2-0.5B/              flow.pt (UNet), hift.pt, campplus.onnx, speech_tokenizer_v2.onnx
DEST/Step-Audio-2-mini/token2wav/  flow.pt (DiT), hift.pt, campplus.onnx, speech_tokenizer_v2_25hz.onnx
DEST/cosyvoice3_llm/, DEST/Fun-CosyVoice3-0.5B-2512/
                                   the same of CosyVoice3

With random-full the speaker encoder is still small, since CAM++'s network is not part of this repository.

A complete checkpoint of the same weights and sources is kept; what another run has left there is removed.
"""

import sys
from pathlib import Path
from typing import get_args

import torch
from cosyvoice_triton.arguments import command_parser, reporting_errors

from tests.random_weights.checkpoint import Weights, make


@reporting_errors()
def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("dest", type=Path, help="directory to write, for example models/random")
    parser.add_argument("--weights", choices=get_args(Weights), default="random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leading-silence", action="store_true", help="answers begin with silent tokens: 7, often 20")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    made = make(args.dest, args.weights, args.seed, args.leading_silence)
    print(f"{args.dest}: {'made' if made else 'exists already'}, RANDOM weights, whose speech is noise")
    return 0


if __name__ == "__main__":
    sys.exit(main())
