"""token2wav on the second GPU of a machine, with the networks of the demo voice."""

from threading import Thread

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.voice.prompt import Prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; run on a machine with two GPUs"),
]


def spoken(stack: stacks.Stack, device: str) -> list[np.ndarray]:
    """Two chunks of a stream, rendered in another thread than the one that loads, as the service does it."""
    # torch captures on one stream for the whole process, of the first GPU. A model's process has one GPU, this one two.
    torch.cuda.graph.default_capture_stream = None
    precision = Precision.named("float16", "float16", device)
    engine = Token2Wav.load(
        stack, TRAINED / stack.checkpoint, device=device, limits=BatchLimits(max_streams=2), precision=precision
    )
    audio: list[np.ndarray] = []

    def render() -> None:
        engine.warm_up()
        rng = np.random.default_rng(0)
        mel = rng.standard_normal((50, 80)).astype(np.float32) - 4
        stream = engine.open(Prompt(np.arange(25), mel, rng.standard_normal(192).astype(np.float32), text=""))
        tokens = rng.integers(0, 6561, 78)
        begin, offsets = (0, (0, 25)) if stack.cumulative else (25, (None, None))
        for part, offset in zip((tokens[:28], tokens[begin:]), offsets, strict=True):
            audio.extend(engine.step([engine.chunk(stream, part, final=len(audio) == 1, offset=offset)]))
        engine.close(stream)

    thread = Thread(target=render)
    thread.start()
    thread.join()
    assert len(audio) == 2
    return audio


@pytest.mark.parametrize("stack", stacks.BUILT_IN[:2], ids=lambda stack: stack.name)
def test_the_second_gpu_gives_the_audio_of_the_first_and_takes_nothing_of_it(stack: stacks.Stack) -> None:
    taken = torch.cuda.memory_reserved(0)
    second = spoken(stack, "cuda:1")
    assert torch.cuda.memory_reserved(0) <= taken and torch.cuda.memory_reserved(1) > 0
    first = spoken(stack, "cuda:0")
    for one, other in zip(first, second, strict=True):
        assert one.shape == other.shape and np.abs(one - other).max() < 1e-3
