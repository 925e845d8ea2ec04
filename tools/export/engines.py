"""Build the TensorRT plans of a stack ahead of serving, or list the existing ones.

    python -m tools.export.engines --model-dir models/official/Step-Audio-2-mini/token2wav
    python -m tools.export.engines --model-dir models/official/CosyVoice2-0.5B --precision bfloat16
    python -m tools.export.engines --model-dir models/official/CosyVoice2-0.5B --list

The model directory holds the stack's ONNX files (python -m tools.export.onnx writes them); plans go to its folder
tensorrt. Run it with the GPU and the TensorRT version that will serve: plans work with no other. Existing plans are
kept, so an interrupted build continues where it stopped. Each plan takes minutes and needs the GPU to itself.

Shapes follow from the limits of serving: give the options in which the rendered stack differs from the defaults.
Exit code: 0 if all plans of the stack exist, 1 if one is missing, 130 if interrupted.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from common import stacks
from common.accel import plans
from common.accel.plans import Key, Machine, Plan, PlanError
from common.accel.tensorrt import import_tensorrt
from common.accel.workloads import PlanPrecision, Serving, Workload
from common.stacks import Stack
from tools.export.builder import build, check

FAILURES = (RuntimeError, ValueError, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, help="directory with flow.pt, campplus.onnx, ...")
    parser.add_argument("--list", action="store_true", help="build nothing; list which plans fit this machine")
    parser.add_argument("--precision", choices=get_args(PlanPrecision), default=Serving.precision, help="of the flow")
    parser.add_argument("--max-streams", type=int, default=Serving.max_streams, help="as the stack was rendered")
    parser.add_argument("--max-hop-tokens", type=int, default=Serving.max_hop_tokens, help="as the stack was rendered")
    parser.add_argument("--device", default="cuda:0", help="the GPU (default: cuda:0)")
    return parser


def stack_of(model_dir: Path) -> Stack:
    """The stack whose ONNX files are in a directory."""
    for stack in stacks.registered():
        if any((model_dir / file).exists() for file in stack.networks.values()):
            return stack
    files = [file for stack in stacks.registered() for file in list(stack.networks.values())[:1]]
    raise ValueError(
        f"{model_dir} holds no ONNX file of a flow ({' or '.join(files)}); run: "
        f"python -m tools.export.onnx --model-dir {model_dir}"
    )


def describe(workload: Workload) -> str:
    sizes = ", ".join(f"{name} {span}" for name, span in workload.profile.items())
    return f"{workload.use}: {workload.onnx}, {workload.precision}, {sizes}"


def build_all(model_dir: Path, workloads: Sequence[Workload], machine: Machine, device: str) -> int:
    """Build the missing plans; returns how many failed."""
    failed = 0
    for number, workload in enumerate(workloads, 1):
        print(f"[{number}/{len(workloads)}] {describe(workload)}", flush=True)
        try:
            print(f"      {build_one(model_dir, workload, machine, device)}", flush=True)
        except FAILURES as error:
            print(f"      failed: {error}", file=sys.stderr, flush=True)
            failed += 1
    return failed


def build_one(model_dir: Path, workload: Workload, machine: Machine, device: str) -> str:
    """Build one plan if it is missing; returns a line about it."""
    try:
        return f"exists already: {plans.find(workload, model_dir, machine).path.name}"
    except PlanError:
        key = Key.of(workload, model_dir, machine)
    timings = model_dir / plans.FOLDER / f"{key.machine.file_name}.timings"
    timings.parent.mkdir(exist_ok=True)
    began = time.monotonic()
    engine = build(model_dir / workload.onnx, workload, timings)
    error = check(engine, model_dir / workload.onnx, workload, device)
    plan = plans.write(model_dir, key, engine, time.monotonic() - began)
    return (
        f"built in {plan.built_seconds:g} s: {plan.path.name} ({len(engine) / 1e6:.1f} MB, "
        f"{100 * error:.2f} % from the ONNX file)"
    )


def list_plans(model_dir: Path, workloads: Sequence[Workload], machine: Machine) -> int:
    """Print whether each plan fits this machine; returns how many uses have none."""
    wanted = {workload.use: Key.of(workload, model_dir, machine) for workload in workloads}
    for path, plan in plans.survey(model_dir):
        print(f"{path.name}  {path.stat().st_size / 1e6:.1f} MB\n      {_verdict(plan, wanted)}")
    missing = 0
    for workload in workloads:
        try:
            plans.find(workload, model_dir, machine)
        except PlanError as error:
            command = f"python -m tools.export.engines --model-dir {model_dir} {workload.options}".strip()
            print(f"{error}; run: {command}", file=sys.stderr)
            missing += 1
    return missing


def _verdict(plan: Plan | None, wanted: dict[str, Key]) -> str:
    if plan is None:
        return "never loaded: its sidecar is missing or damaged; remove it and build it again"
    if (key := wanted.get(plan.key.use)) is None:
        return f"not of this stack: {plan.key.use}"
    if differences := key.differences(plan.key):
        return f"does not fit: {'; '.join(differences)}"
    return f"fits this machine: {plan.key.use}"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        stack = stack_of(args.model_dir)
        workloads = Serving(args.precision, args.max_streams, args.max_hop_tokens).workloads(stack)
        machine = Machine.here(args.device)
        print(f"{stack.name} stack in {args.model_dir}; {machine}")
        if args.list:
            return min(1, list_plans(args.model_dir, workloads, machine))
        import_tensorrt()
        if machine.gpu == "none":
            raise ValueError("there is no GPU: plans are built on the machine that serves")
        failed = build_all(args.model_dir, workloads, machine, args.device)
    except (*FAILURES, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished plans are kept", file=sys.stderr)
        return 130
    print(f"{len(workloads) - failed} of {len(workloads)} plans exist")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
