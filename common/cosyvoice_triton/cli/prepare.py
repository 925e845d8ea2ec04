"""Make everything that serving reads. Complete parts are kept, interrupted ones are completed.

    cosyvoice-triton prepare demo models/demo                     a small trained checkpoint, for a CPU
    cosyvoice-triton prepare download models/official             the official checkpoints, and the LLM's directory
    cosyvoice-triton prepare engine models/official               the LLM for TensorRT-LLM, in NVIDIA's image
    cosyvoice-triton prepare engine models/official --kind onnxruntime_genai        the LLM for a CPU
    cosyvoice-triton prepare plans models/official --stack dit    token2wav's TensorRT plans, on the GPU that serves
    cosyvoice-triton prepare plans models/official --stack dit --capability 8.9     the same on any machine

Concurrent runs wait for one another. HF_ENDPOINT is a mirror of the hub, HF_TOKEN your access token,
MODELSCOPE_ENDPOINT a mirror of ModelScope (download --hub modelscope), and CHECKPOINT_REVISIONS="REPOSITORY=COMMIT ..."
selects other revisions than the newest.
"""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, program, reporting_errors
from cosyvoice_triton.config import PlanPrecision
from cosyvoice_triton.prepare import hub, steps
from cosyvoice_triton.prepare.genai import PRECISIONS


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    subparsers = parser.add_subparsers(dest="step", required=True)
    demo = subparsers.add_parser("demo", help="the demo checkpoint, of all stacks, and the LLM of one for a CPU")
    download = subparsers.add_parser("download", help="the official checkpoints")
    download.add_argument("--hub", choices=get_args(hub.HubName), default="huggingface", help="default: huggingface")
    download.add_argument("--spk2info", action="store_true", help="also upstream's spk2info.pt, speakers by name")
    download.add_argument("--rl", action="store_true", help="the LLM that was trained further: cosyvoice3's llm.rl.pt")
    download.add_argument(
        "--python-path", action="store_true", help="also MODELS/python: PYTHONPATH of `vllm serve` in its own container"
    )
    built = subparsers.add_parser("engine", help="the files that the LLM's engine loads")
    built.add_argument("--kind", choices=("tensorrt_llm", "onnxruntime_genai"), default="tensorrt_llm")
    built.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="of onnxruntime_genai (int4)")
    built.add_argument("--max-batch-size", type=int, default=64, help="concurrent streams (64)")
    built.add_argument("--tp-size", type=int, default=1, help="GPUs of tensor parallelism")
    built.add_argument("--pp-size", type=int, default=1, help="GPUs of pipeline parallelism")
    plans = subparsers.add_parser(
        "plans", help="the stack's TensorRT plans, and the ONNX files that they are built from"
    )
    plans.add_argument("--precision", choices=get_args(PlanPrecision), default="float16", help="of the flow (float16)")
    target = plans.add_mutually_exclusive_group()
    target.add_argument("--device", default="cuda:0", help="the GPU (cuda:0)")
    target.add_argument("--capability", nargs="+", default=[], metavar="8.9", help="for all GPUs of these instead")
    for step in (demo, download, built, plans):
        step.add_argument("models", type=Path, help="the directory of the checkpoints")
        step.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    return parser


@reporting_errors("interrupted; run again to continue")
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    # Process 1 of a container gets no SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.step == "demo":
        made = steps.demo(args.models, args.stack)
        steps.report(args.models, made, "a small trained voice, see demo_voice/README.md")
    else:
        with steps.only_one(args.models):
            {"download": steps.download, "engine": steps.build, "plans": steps.plans}[args.step](args.models, args)
    stack = f" --stack {args.stack}"
    if args.step == "download":
        print(f"without a GPU:  {program()} prepare engine {args.models}{stack} --kind onnxruntime_genai")
    print(f"next:           {program()} serve --models {args.models}{stack} --speech-port 10086")
    if args.step == "download":
        print(f"then:           {program()} say 'Hello.' --voice {steps.VOICE}")
    return 0
