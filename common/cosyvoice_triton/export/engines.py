"""Build the TensorRT plans of a stack ahead of serving, or list the existing ones.

    cosyvoice-triton export engines --model-dir models/official/Step-Audio-2-mini/token2wav
    cosyvoice-triton export engines --model-dir models/official/CosyVoice2-0.5B --precision bfloat16
    cosyvoice-triton export engines --model-dir models/official/CosyVoice2-0.5B --capability 8.9 12.0
    cosyvoice-triton export engines --model-dir models/official/CosyVoice2-0.5B --list

The model directory holds the stack's ONNX files (cosyvoice-triton export onnx writes them); plans go to
its folder
tensorrt. Existing plans are kept, so an interrupted build continues where it stopped. With the package tensorrt run it
with the GPU and the version that will serve: its plans work with no other, take minutes each and need the GPU to
themselves. With tensorrt_rtx plans take seconds and are for all GPUs of a compute capability: this machine's, or those
of --capability, for which no GPU is needed here. Such plans cannot be compared with their ONNX files where they are
built; the same command without --capability does it on the machine that serves.

Shapes follow from the limits of serving: give the options in which the rendered stack differs from the defaults.
Exit code: 0 if all plans of the stack exist, 1 if one is missing, 130 if interrupted.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.export.builder import Build, check
from cosyvoice_triton.runtimes import editions, plans
from cosyvoice_triton.runtimes.plans import Key, Machine, Plan, PlanError
from cosyvoice_triton.runtimes.workloads import PlanPrecision, Serving, Workload
from cosyvoice_triton.stacks import Stack

FAILURES = (RuntimeError, ValueError, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, help="directory with flow.pt, campplus.onnx, ...")
    parser.add_argument("--list", action="store_true", help="build nothing; list which plans fit this machine")
    parser.add_argument("--precision", choices=get_args(PlanPrecision), default=Serving.precision, help="of the flow")
    parser.add_argument("--max-streams", type=int, default=Serving.max_streams, help="as the stack was rendered")
    parser.add_argument("--max-hop-tokens", type=int, default=Serving.max_hop_tokens, help="as the stack was rendered")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--device", default="cuda:0", help="the GPU (default: cuda:0)")
    target.add_argument(
        "--capability", nargs="+", metavar="8.9", help="for all GPUs of these compute capabilities; tensorrt_rtx only"
    )
    return parser


def stack_of(model_dir: Path) -> Stack:
    """The stack whose ONNX files are in a directory."""
    for stack in stacks.registered():
        if any((model_dir / file).exists() for file in stack.networks.values()):
            return stack
    files = [file for stack in stacks.registered() for file in list(stack.networks.values())[:1]]
    raise ValueError(
        f"{model_dir} holds no ONNX file of a flow ({' or '.join(files)}); run: "
        f"cosyvoice-triton export onnx --model-dir {model_dir}"
    )


def describe(workload: Workload) -> str:
    sizes = ", ".join(f"{name} {span}" for name, span in workload.profile.items())
    return f"{workload.use}: {workload.onnx}, {workload.precision}, {sizes}"


def build_all(model_dir: Path, workloads: Sequence[Workload], machines: Sequence[Machine], device: str) -> int:
    """Build the missing plans; returns how many failed."""
    jobs = [(machine, workload) for machine in machines for workload in workloads]
    failed = 0
    for number, (machine, workload) in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {machine.capability} {describe(workload)}", flush=True)
        try:
            print(f"      {build_one(model_dir, workload, machine, device)}", flush=True)
        except FAILURES as error:
            print(f"      failed: {error}", file=sys.stderr, flush=True)
            failed += 1
    return failed


def build_one(model_dir: Path, workload: Workload, machine: Machine, device: str) -> str:
    """Build one plan if it is missing, and compare it if the GPU is here; returns a line about it."""
    onnx = model_dir / workload.onnx
    here = machine == Machine.here(device)
    try:
        known = plans.find(workload, model_dir, machine)
        if known.error is not None or not here:
            return f"exists already: {known.path.name}"
        key, engine, seconds, done = known.key, known.read(), known.built_seconds, "compared"
        known.withdraw()  # until it has passed
    except PlanError:
        key, began = Key.of(workload, model_dir, machine), time.monotonic()
        engine = Build.of(onnx, workload, machine.capability).plan()
        seconds = time.monotonic() - began
        done = f"built in {seconds:.1f} s"
    error = check(engine, onnx, workload, device) if here else None
    plan = plans.write(model_dir, key, engine, seconds, error)
    compared = "not compared: no such GPU here" if error is None else f"{100 * error:.2f} % from the ONNX file"
    return f"{done}: {plan.path.name} ({len(engine) / 1e6:.1f} MB, {compared})"


def list_plans(model_dir: Path, workloads: Sequence[Workload], machine: Machine) -> int:
    """Print whether each plan fits the machine; returns how many uses have none."""
    wanted = {workload.use: Key.of(workload, model_dir, machine) for workload in workloads}
    for path, plan in plans.survey(model_dir):
        print(f"{path.name}  {path.stat().st_size / 1e6:.1f} MB\n      {_verdict(plan, wanted)}")
    missing = 0
    for workload in workloads:
        try:
            plans.find(workload, model_dir, machine)
        except PlanError as error:
            command = f"cosyvoice-triton export engines --model-dir {model_dir} {workload.options}".strip()
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
    compared = "never compared with its ONNX file" if plan.error is None else f"{100 * plan.error:.2f} % from it"
    return f"fits: {plan.key.use}, {compared}"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        stack = stack_of(args.model_dir)
        workloads = Serving(args.precision, args.max_streams, args.max_hop_tokens).workloads(stack)
        machines = [Machine.ahead(capability) for capability in args.capability or ()] or [Machine.here(args.device)]
        print(f"{stack.name} stack in {args.model_dir}; {'; '.join(map(str, machines))}")
        if args.list:
            return min(1, sum(list_plans(args.model_dir, workloads, machine) for machine in machines))
        editions.required()
        if machines[0].gpu == "none":
            raise ValueError("there is no GPU: name the --capability of the one that will serve, or build there")
        failed = build_all(args.model_dir, workloads, machines, args.device)
    except (*FAILURES, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished plans are kept", file=sys.stderr)
        return 130
    wanted = len(machines) * len(workloads)
    print(f"{wanted - failed} of {wanted} plans exist")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
