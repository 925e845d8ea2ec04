"""Time what can compute the DiT stack's networks on this CPU, at full size with random weights: a Markdown table.

    python -m scripts.bench_cpu

One utterance at once, in the voice of a recording: the flow's Euler steps over recording and utterance, then HiFT over
the utterance. Each candidate runs once to warm up, then --repeat times; its best time counts, because other processes
only ever add to it. onnxruntime's file is exported first, which takes a minute.
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs as a file, from anywhere, installed or not

from common.accel.loading import use_runtime
from common.constants import EULER_STEPS, MEL_BINS, MEL_RATE, SPEAKER_DIM, SPEECH_VOCAB, TOKEN_RATE
from common.flow import DiTFlow, DiTFlowConfig
from common.hift.generator import HiFTGenerator
from common.overlap import hamming_window
from common.token2wav.noise import flow_noise, source_noise
from common.token2wav.vocoder import StreamingVocoder
from scripts.bench_token2wav import randomise
from scripts.export_onnx import dit_exports, write


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = [
        (name, best(run, args.repeat))
        for name, run in tqdm(candidates(args.prompt_seconds, args.seconds), desc="timing", total=CANDIDATES)
    ]
    print(f"{args.seconds} s of audio, {args.prompt_seconds} s of recording, {args.threads} threads\n")
    print("| network | computed by | s | s per second of audio |\n|---|---|---|---|")
    for (network, runtime), seconds in rows:
        print(f"| {network} | {runtime} | {seconds:.2f} | {seconds / args.seconds:.2f} |")
    return 0


CANDIDATES = 5
Candidate = tuple[tuple[str, str], Callable[[], object]]


@torch.inference_mode()
def candidates(prompt_seconds: float, seconds: float) -> Iterator[Candidate]:
    """(network, runtime), and what runs it once."""
    flow, hift = DiTFlow(DiTFlowConfig()).eval(), HiFTGenerator().eval()
    for network in (flow, hift):
        randomise(network)
    count = int((prompt_seconds + seconds) * TOKEN_RATE)
    token, length = torch.randint(SPEECH_VOCAB, (1, count)), torch.tensor([count])
    prompt = torch.randn(1, int(prompt_seconds * MEL_RATE), MEL_BINS)
    speaker, noise = torch.randn(1, SPEAKER_DIM), flow_noise().read(0, 2 * count).T[None]

    def run_flow(network: DiTFlow) -> Callable[[], object]:
        frames = torch.tensor([prompt.shape[1]])
        return lambda: network.inference(token, length, prompt, frames, speaker, noise=noise, steps=EULER_STEPS)

    yield ("flow", "torch, float32"), run_flow(flow)
    yield ("flow", "torch, bfloat16"), run_flow(copy.deepcopy(flow).to(torch.bfloat16))
    yield ("flow", "onnxruntime, float32"), run_flow(on_onnx(flow))  # last: it gives up torch's weights
    mel = torch.randn(MEL_BINS, int(seconds * MEL_RATE)) - 6
    for dtype in (torch.float32, torch.bfloat16):
        body = copy.deepcopy(hift).body_to(dtype)
        vocoder = StreamingVocoder(body, source_noise(hift.config.harmonics + 1), hamming_window(), max_streams=1)
        yield ("HiFT", f"torch, {str(dtype).removeprefix('torch.')}"), partial(vocoder.whole, [mel])


def on_onnx(flow: DiTFlow) -> DiTFlow:
    """The flow with its estimator in onnxruntime."""
    with tempfile.TemporaryDirectory() as scratch:
        for export in dit_exports(flow):
            write(export, Path(scratch) / export.signature.file)
        use_runtime(flow, "onnxruntime", scratch, device="cpu", max_streams=1)
    return flow


def best(run: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of `repeat` runs after one."""
    run()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=8.5, help="of speech")
    parser.add_argument("--prompt-seconds", type=float, default=5.0, help="of the recording whose voice it is")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
