"""Build the TensorRT plans of every network that can be exported, with random weights. Prints a table.

    python -m tools.bench.plans --capability 7.5 8.9 12.0
    python -m tools.bench.plans --capability 8.9 --campplus models/official/CosyVoice2-0.5B/campplus.onnx

Full-size networks of both stacks. Besides the plans that serving loads, those of the speech tokenizer, of the flow's
encoder and of HiFT's convolutions, which show what TensorRT accepts: serving computes them in torch. It needs
tensorrt_rtx, no GPU, and 12 GB of memory; nothing is run. CAM++ is not part of this repository: without --campplus the
demo's small one is taken.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common import stacks
from common.accel.signatures import Signature
from common.accel.workloads import MAX_BATCH, Serving, Span, Workload
from common.config import OrchestratorConfig
from common.constants import CONTEXT_TOKENS, MAX_REFERENCE_SECONDS, MEL_RATE, MIN_REFERENCE_SECONDS, TOKEN_RATE
from common.flow import DiTFlow, DiTFlowConfig, UNetFlow, UNetFlowConfig
from common.flow.encoder import UpsampleConformerEncoder
from common.hift import HiFTConfig, HiFTGenerator
from tools.bench.token2wav import randomise
from tools.demo_model import speaker, speech_tokenizer
from tools.export.builder import Build, BuildError
from tools.export.onnx import BINS_PER_FRAME, Export, Inputs, dit_exports, unet_exports, write

ROWS = Span(1, 4, MAX_BATCH)
TOKENIZER_RATE = 100  # mel frames of the speech tokenizer per second


@dataclass(frozen=True)
class Sizes:
    unet: UNetFlowConfig = UNetFlowConfig()
    dit: DiTFlowConfig = DiTFlowConfig()
    hift: HiFTConfig = HiFTConfig()
    tokenizer: tuple[int, int] = speech_tokenizer.OFFICIAL


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    print(f"| network | precision | sizes | ONNX MB | {' | '.join(args.capability)} |")
    print("|---" * (4 + len(args.capability)) + "|")
    with tempfile.TemporaryDirectory() as scratch:
        for path, workload in subjects(Path(scratch), Sizes(), args.campplus):
            cells = [measured(path, workload, capability) for capability in args.capability]
            size = f"{path.stat().st_size / 1e6:.0f}"
            profile = ", ".join(f"{name} {span}" for name, span in workload.profile.items())
            print(f"| {workload.use} | {workload.precision} | {profile} | {size} | {' | '.join(cells)} |", flush=True)
    return 0


def measured(path: Path, workload: Workload, capability: str) -> str:
    """Size and time of one plan, or why TensorRT builds none."""
    begun = time.perf_counter()
    try:
        plan = Build.of(path, workload, capability).plan()
    except BuildError as error:
        return f"refused: {error}".replace("|", "/")
    return f"{len(plan) / 1e6:.0f} MB, {time.perf_counter() - begun:.1f} s"


def subjects(folder: Path, sizes: Sizes, campplus: Path | None = None) -> Iterator[tuple[Path, Workload]]:
    """Every network as an ONNX file with a use; files are written when they are needed."""
    unet, dit = UNetFlow(sizes.unet).eval().requires_grad_(False), DiTFlow(sizes.dit).eval().requires_grad_(False)
    exports = [*unet_exports(stacks.UNET, unet), *dit_exports(stacks.DIT, dit)]
    written: dict[str, Path] = {}
    for export in exports:
        randomise(export.module)
        written[export.signature.file] = folder / export.signature.file
        write(export, written[export.signature.file])
    for stack in (stacks.UNET, stacks.DIT):
        for workload in Serving().workloads(stack)[:-1]:
            named = Workload(f"{stack.name} {workload.use}", workload.signature, workload.profile, workload.precision)
            yield written[workload.onnx], named
    if campplus is None:
        campplus = folder / stacks.DIT.speaker_encoder
        speaker.write_campplus(campplus, speaker.random_weights(0), "random weights")
    yield campplus, Serving().workloads(stacks.DIT)[-1]
    yield tokenizer(folder, sizes.tokenizer)
    for workload, export in ((ENCODER, encoder_export(dit.encoder)), (BODY, body_export(HiFTGenerator(sizes.hift)))):
        randomise(export.module)
        write(export, folder / workload.onnx)
        yield folder / workload.onnx, workload


_FRAMES = Span(
    int(MIN_REFERENCE_SECONDS * TOKENIZER_RATE), 5 * TOKENIZER_RATE, int(MAX_REFERENCE_SECONDS * TOKENIZER_RATE)
)


def tokenizer(folder: Path, sizes: tuple[int, int]) -> tuple[Path, Workload]:
    """The S3 tokenizer of a recording, in the official form: one row."""
    signature = Signature(stacks.UNET.speech_tokenizer, {"feats": {2: "frames"}, "feats_length": {}}, ("indices",))
    path = folder / signature.file
    speech_tokenizer.write_speech_tokenizer(path, speech_tokenizer.random_weights(0, *sizes), "random weights")
    return path, Workload("speech tokenizer", signature, {"frames": _FRAMES}, "float32")


# float32: TensorRT's parser takes the operator Range, of the positions, in no half precision.
_WINDOW = int(MAX_REFERENCE_SECONDS * TOKEN_RATE) + CONTEXT_TOKENS + OrchestratorConfig.max_hop_tokens
ENCODER = Workload(
    "flow's encoder",
    Signature(
        "flow.encoder.fp32.onnx", {name: {0: "rows", 1: "tokens"} for name in ("xs", "present", "visible")}, ("out",)
    ),
    {"rows": ROWS, "tokens": Span(4, 5 * TOKEN_RATE, _WINDOW)},
    "float32",
)
_BODY_FRAMES = Span(8, MEL_RATE, 2 * OrchestratorConfig.max_hop_tokens + 8)
BODY = Workload(
    "HiFT's convolutions",
    Signature(
        "hift.body.fp32.onnx", {"mel": {0: "rows", 2: "frames"}, "excitation": {0: "rows", 2: "bins"}}, ("spectrum",)
    ),
    {
        "rows": ROWS,
        "frames": _BODY_FRAMES,
        "bins": Span(*(BINS_PER_FRAME * n + 1 for n in (_BODY_FRAMES.least, _BODY_FRAMES.usual, _BODY_FRAMES.most))),
    },
    "float16",
)


def encoder_export(encoder: UpsampleConformerEncoder) -> Export:
    ahead, width = 1 + encoder.config.lookahead, encoder.config.width

    def inputs(B: int, T: int) -> Inputs:
        present, visible = torch.ones(B, T, ahead, dtype=torch.bool), torch.full((B, T), T)
        return {"xs": torch.randn(B, T, ahead, width), "present": present, "visible": visible}

    return Export(ENCODER.signature, encoder.eval().requires_grad_(False), inputs, ((2, 20), (3, 50)))


class _Body(torch.nn.Module):
    """HiFT without its source, its STFT and the inverse, which TensorRT does not have."""

    def __init__(self, network: HiFTGenerator) -> None:
        super().__init__()
        self.network = network

    def forward(self, mel: torch.Tensor, excitation: torch.Tensor) -> torch.Tensor:
        return self.network.body(mel, excitation)


def body_export(network: HiFTGenerator) -> Export:
    channels = network.config.n_fft + 2

    def inputs(B: int, T: int) -> Inputs:
        bins = BINS_PER_FRAME * T + 1
        return {"mel": torch.randn(B, network.config.mel_bins, T), "excitation": torch.randn(B, channels, bins)}

    return Export(BODY.signature, _Body(network).eval().requires_grad_(False), inputs, ((2, 9), (1, 30)))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--capability", nargs="+", default=["8.9"], metavar="8.9", help="compute capabilities")
    parser.add_argument("--campplus", type=Path, help="campplus.onnx of full size")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
