"""Export a checkpoint's networks to ONNX files for onnxruntime and TensorRT, and check each against torch.

    cosyvoice-triton export onnx --model-dir models/official/CosyVoice2-0.5B
    cosyvoice-triton export onnx --model-dir models/official/Step-Audio-2-mini/token2wav

File names, inputs and outputs are upstream's, so upstream's files load here and these files in upstream's tools.
Existing files, including upstream's, are checked and kept. Every file is run in onnxruntime on the CPU with several
shapes and batch sizes and compared with torch; the exit code is 1 if one differs. A new file that differs is kept as
FILE.failed.
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.checkpoint import read_state
from cosyvoice_triton.constants import MEL_BINS
from cosyvoice_triton.networks.flow.checkpoint import load_dit_flow, load_unet_flow
from cosyvoice_triton.networks.flow.config import DiTConfig
from cosyvoice_triton.runtimes.onnx import OnnxNetwork
from cosyvoice_triton.runtimes.signatures import NextChunk, Signature, WholeUtterance, signature_of
from cosyvoice_triton.stacks import Stack

TOLERANCE = 1e-4  # largest difference over the largest value, float32
MAX_ROWS, MAX_FRAMES = 128, 20_000  # for the exporter; the dimensions in the files are dynamic

Inputs = dict[str, Tensor]


WHOLE_SIZES = ((2, 4), (2, 57), (4, 200), (16, 32))
CHUNK_SIZES = ((2, 30, 0), (2, 4, 250), (4, 100, 37), (16, 26, 100))


@dataclass(frozen=True)
class Export:
    """One network: its module, a function that makes inputs of a size, and the sizes to check."""

    signature: Signature
    module: nn.Module
    inputs: Callable[..., Inputs]
    sizes: tuple[tuple[int, ...], ...] = WHOLE_SIZES


@reporting_errors()
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    passed = [write_and_check(export, args.output_dir or args.model_dir) for export in exports_of(args.model_dir)]
    return 0 if all(passed) else 1


def exports_of(model_dir: Path) -> list[Export]:
    """Return the networks of a checkpoint directory that can be exported: of CosyVoice2 one network, over whole
    utterances and under the masks of streams; of Step-Audio2 over whole utterances, and over chunks with caches.
    Raise ValueError if there is no flow.pt, or none of its networks can be exported."""
    path = model_dir / Stack.flow
    stack = stacks.of_flow(read_state(path, "meta"), path)
    if stack is stacks.UNET:
        unet = load_unet_flow(path).decoder.estimator
        return [
            Export(signature_of(stack, "whole"), WholeUtterance(unet).eval(), whole_inputs),
            Export(signature_of(stack, "streaming"), WholeUtterance(unet, streaming=True).eval(), whole_inputs),
        ]
    if stack is stacks.DIT:
        dit = load_dit_flow(path).decoder.estimator
        return [
            Export(signature_of(stack, "whole"), WholeUtterance(dit).eval(), whole_inputs),
            Export(signature_of(stack, "chunk"), NextChunk(dit).eval(), partial(chunk_inputs, dit.config), CHUNK_SIZES),
        ]
    raise ValueError(f"{path}: no network of the {stack.name} stack can be exported")


def whole_inputs(R: int, T: int) -> Inputs:
    """Return rows of different lengths; the first has all frames."""
    lengths = torch.tensor([max(1, T - 3 * row) for row in range(R)])
    return {
        "x": torch.randn(R, MEL_BINS, T),
        "mask": (torch.arange(T) < lengths[:, None])[:, None].float(),
        "mu": torch.randn(R, MEL_BINS, T),
        "t": torch.rand(R),
        "spks": torch.randn(R, MEL_BINS),
        "cond": torch.randn(R, MEL_BINS, T),
    }


def chunk_inputs(config: DiTConfig, R: int, T: int, K: int) -> Inputs:
    """Return rows without padding, after K frames in the caches."""
    inputs = whole_inputs(R, T)
    del inputs["mask"]
    caches = {
        "cnn_cache": torch.randn(config.depth, R, 2 * config.width, 2),
        "att_cache": torch.randn(config.depth, R, config.heads, K, 2 * config.head_dim),
    }
    return inputs | caches


def write_and_check(export: Export, directory: Path) -> bool:
    """Write the file unless it exists; return whether its outputs equal torch's."""
    path = directory / export.signature.file
    if path.exists():
        print(f"{path}: exists already, checking it")
        return check(export, path)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".export.") as scratch:
        written = Path(scratch) / path.name
        print(f"{path}: exporting (a minute at full size)")
        write(export, written)
        passed = check(export, written)
        written.rename(path if passed else path.with_name(f"{path.name}.failed"))
    return passed


def write(export: Export, path: Path) -> None:
    """Export with all varying dimensions dynamic."""
    dims = {
        "rows": torch.export.Dim("rows", min=1, max=MAX_ROWS),
        "frames": torch.export.Dim("frames", min=1, max=MAX_FRAMES),
        "cached": torch.export.Dim("cached", min=0, max=MAX_FRAMES),
    }
    axes = export.signature.axes
    shapes = {name: {axis: dims[dim] for axis, dim in varying.items()} for name, varying in axes.items()}
    # Sizes that occur in no other dimension, so that the exporter treats none of them as a constant.
    example = export.inputs(*(6, 37, 29)[: len(export.sizes[0])])
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages and names that do not matter here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            export.module,
            (),
            str(path),
            kwargs=example,
            input_names=list(export.signature.inputs),
            output_names=list(export.signature.outputs),
            dynamic_shapes={name: shapes[name] for name in example},
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def check(export: Export, path: Path) -> bool:
    """Compare onnxruntime with torch for each size, and print a line."""
    network = OnnxNetwork(path)
    expected = set(export.signature.inputs), set(export.signature.outputs)
    found = set(network.inputs), set(network.outputs)
    if found != expected:
        print(f"  FAILED: inputs and outputs are {found}, expected {expected}")
        return False
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    passed = True
    for size in export.sizes:
        error = difference(export, network, size)
        good = error <= TOLERANCE
        passed &= good
        print(f"  {'ok' if good else 'FAILED'}: {_named(export, size)}, largest error {error:.1e}")
    torch.set_rng_state(generator_state)
    return passed


@torch.inference_mode()
def difference(export: Export, network: OnnxNetwork, size: tuple[int, ...]) -> float:
    """Return the largest difference of any output, relative to its largest value. Newest cache frames may be first."""
    inputs = export.inputs(*size)
    results = export.module(**inputs)
    outputs = network.run(inputs)
    worst = 0.0
    results = results if isinstance(results, tuple) else (results,)
    for name, wanted in zip(export.signature.outputs, results, strict=True):
        got = outputs[name]
        if got.shape != wanted.shape:
            return float("inf")
        candidates = [wanted]
        if name == "new_att_cache":
            known = inputs["att_cache"].shape[3]
            candidates.append(torch.cat([wanted[..., known:, :], wanted[..., :known, :]], dim=3))
        scale = wanted.abs().max().item() or 1.0
        worst = max(worst, min((got - x).abs().max().item() for x in candidates) / scale)
    return worst


def _named(export: Export, size: tuple[int, ...]) -> str:
    names = ("rows", "frames", "cached frames")
    return ", ".join(f"{count} {name}" for count, name in zip(size, names, strict=False))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--model-dir", type=Path, required=True, help="directory with the flow.pt of a stack")
    parser.add_argument("--output-dir", type=Path, help="directory for the files (default: the model directory)")
    return parser.parse_args(argv)
