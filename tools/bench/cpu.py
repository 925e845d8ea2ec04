"""Time the DiT stack's networks in each runtime on this CPU, at full size with random weights. Prints a table.

    python -m tools.bench.cpu

One whole utterance: the flow's encoder and Euler steps over prompt and utterance, then HiFT over the utterance. The
candidates run in turn, once as warm-up and then --repeat times; the best time of each counts, because other processes
only add to it. onnxruntime's files are exported first, which takes a minute or two.
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from common import stacks
from common.accel.loading import use_runtime
from common.constants import EULER_STEPS, MEL_BINS, MEL_RATE, SPEAKER_DIM, SPEECH_VOCAB, TOKEN_RATE
from common.flow import DiTFlow, DiTFlowConfig
from common.hift.generator import HiFTGenerator
from common.token2wav.hift.streaming import StreamingVocoder
from common.token2wav.limits import BatchLimits
from common.token2wav.noise import flow_noise, source_noise
from common.token2wav.precision import Precision
from tools.bench.token2wav import randomise
from tools.export.onnx import dit_exports, write
from tools.parity.reference import dit_flow


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    best = fastest(candidates(args.prompt_seconds, args.seconds), args.repeat)
    print(f"{args.seconds} s of audio, {args.prompt_seconds} s of prompt, {args.threads} threads\n")
    print("| network | runtime | s | s per second of audio |\n|---|---|---|---|")
    for (network, runtime), seconds in best.items():
        print(f"| {network} | {runtime} | {seconds:.2f} | {seconds / args.seconds:.2f} |")
    auto = Precision.named("auto", "auto", "cpu")
    chosen = ("flow", in_torch(auto.flow)), ("HiFT", in_torch(auto.vocoder))
    total = sum(best[name] for name in chosen)
    print(f"\nauto takes {' and '.join(map(' in '.join, chosen))}: {total / args.seconds:.2f} s per second of audio")
    return 0


Candidate = tuple[str, str]  # network, runtime


def candidates(prompt_seconds: float, seconds: float) -> dict[Candidate, Callable[[], object]]:
    """For each candidate a function that runs it once."""
    flow, hift = DiTFlow(DiTFlowConfig()).eval(), HiFTGenerator().eval()
    for network in (flow, hift):
        randomise(network)
    count = int((prompt_seconds + seconds) * TOKEN_RATE)
    token, length = torch.randint(SPEECH_VOCAB, (1, count)), torch.tensor([count])
    prompt = torch.randn(1, int(prompt_seconds * MEL_RATE), MEL_BINS)
    speaker, noise = torch.randn(1, SPEAKER_DIM), flow_noise().read(0, 2 * count).T[None]
    mel = torch.randn(MEL_BINS, int(seconds * MEL_RATE)) - 6

    def run_flow(network: DiTFlow) -> Callable[[], object]:
        frames = torch.tensor([prompt.shape[1]])
        return lambda: dit_flow.inference(
            network, token, length, prompt, frames, speaker, noise=noise, steps=EULER_STEPS
        )

    def run_hift(dtype: torch.dtype) -> Callable[[], object]:
        body = copy.deepcopy(hift).body_to(dtype)
        vocoder = StreamingVocoder(body, source_noise(hift.config.harmonics + 1), limits=BatchLimits(max_streams=1))
        return lambda: vocoder.whole([mel])

    return {
        ("flow", in_torch(torch.float32)): run_flow(flow),
        ("flow", in_torch(torch.bfloat16)): run_flow(copy.deepcopy(flow).to(torch.bfloat16)),
        ("flow", "onnxruntime, float32"): run_flow(on_onnx(copy.deepcopy(flow))),
        ("HiFT", in_torch(torch.float32)): run_hift(torch.float32),
        ("HiFT", in_torch(torch.bfloat16)): run_hift(torch.bfloat16),
    }


def in_torch(dtype: torch.dtype) -> str:
    return f"torch, {str(dtype).removeprefix('torch.')}"


def on_onnx(flow: DiTFlow) -> DiTFlow:
    """The flow with its estimator in onnxruntime."""
    with tempfile.TemporaryDirectory() as scratch:
        for export in dit_exports(stacks.DIT, flow):
            write(export, Path(scratch) / export.signature.file)
        use_runtime(flow, stacks.DIT, "onnxruntime", scratch, device="cpu", max_streams=1)
    return flow


@torch.inference_mode()
def fastest(runs: Mapping[Candidate, Callable[[], object]], repeat: int) -> dict[Candidate, float]:
    """Seconds of the fastest of `repeat` runs after a warm-up. The candidates run in turn, so that other work on the
    machine affects all of them.
    """
    times: dict[Candidate, list[float]] = {name: [] for name in runs}
    for name, run in tqdm([*runs.items()] * (1 + repeat), desc="timing"):
        begin = time.perf_counter()
        run()
        times[name].append(time.perf_counter() - begin)
    return {name: min(of[1:]) for name, of in times.items()}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=8.5, help="length of the utterance")
    parser.add_argument("--prompt-seconds", type=float, default=5.0, help="length of the voice prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
