"""The whole system once: demo checkpoint, rendered repository, real tritonserver, one streaming request."""

import asyncio
import time
from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.client.grpc_client import synthesize
from cosyvoice_triton.client.requests import SpeechResult, Utterance
from cosyvoice_triton.demo_checkpoint.checkpoint import STACKS
from cosyvoice_triton.demo_checkpoint.make import make_demo_model
from cosyvoice_triton.prepare.genai import convert
from cosyvoice_triton.server.rendering import StackOptions, render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "models" / "demo"
TEXT = "Good morning. You are listening to Cosy Voice, which runs on your own computer."
SPEAKER = "rms"
SEED = 2  # of the sampling, so that the demo is the same everywhere
STEPS = 4


def run(stack: str, text: str, speaker: str, ports: Ports) -> SpeechResult:
    """Make what is not there yet, serve it, ask once, shut down. Raises ValueError, RuntimeError or OSError."""
    if stacks.named(stack) not in STACKS:
        raise ValueError(f"no trained demo voice for {stack}, only for {', '.join(each.name for each in STACKS)}")
    step(1, f"demo checkpoint, a small trained voice: {shown(CHECKPOINT)}")
    prepare_checkpoint(stacks.named(stack).llm)
    repository = ROOT / "build" / stack
    step(2, f"model repository of the {stack} stack: {shown(repository)}")
    options = StackOptions(models_dir=CHECKPOINT, stack=stack, device="cpu")
    render(options, repository)
    step(3, "tritonserver: starting and loading the models")
    begun = time.monotonic()
    with TritonServer(repository, ports=ports) as server:
        print(f"      ready after {time.monotonic() - begun:.1f} s: HTTP {server.http_url}, gRPC {server.grpc_url}")
        step(4, f"one streaming request in the voice {speaker}: {text}")
        utterance = Utterance(text, speaker=speaker, parameters={"seed": SEED})
        speech = asyncio.run(synthesize(server.grpc_url, options.orchestrator, utterance))
    return speech


def step(number: int, what: str) -> None:
    print(f"[{number}/{STEPS}] {what}", flush=True)


def shown(path: Path) -> Path:
    return path.relative_to(ROOT)


def prepare_checkpoint(llm: stacks.SpeechLLM) -> None:
    """The checkpoint and the form of its LLM that onnxruntime-genai reads; existing files are kept."""
    make_demo_model(CHECKPOINT)
    convert(CHECKPOINT / llm.directory, CHECKPOINT / llm.genai, "fp32")
