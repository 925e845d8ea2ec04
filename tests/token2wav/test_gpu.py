"""Fused kernels and CUDA graphs compared with the plain form, on a GPU. Weights are random."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS
from cosyvoice_triton.monitoring.metrics import FAILED, RETRIED
from cosyvoice_triton.networks.flow import (
    CosyVoice3Flow,
    CosyVoice3FlowConfig,
    DiTFlow,
    DiTFlowConfig,
    UNetFlow,
    UNetFlowConfig,
)
from cosyvoice_triton.networks.flow.config import DiTConfig, EncoderConfig, RotaryDiTConfig, UNetConfig
from cosyvoice_triton.networks.hift.config import HiFTConfig
from cosyvoice_triton.networks.hift.generator import HiFTGenerator
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.cached_graphs import GraphedSolve
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import CosyVoice3Streaming
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches
from cosyvoice_triton.token2wav.flow.solve import GatheredSolve
from cosyvoice_triton.token2wav.flow.unet_flow import GraphedWindowSolve, PlainWindowSolve, UNetStreaming
from cosyvoice_triton.token2wav.gpu.graphs import Graphs, _capture_stream
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise, source_noise
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.stream import Stream, VocoderState
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

from tests.support.streams import prompt

pytestmark = pytest.mark.gpu
STEPS = 3
ENCODER = EncoderConfig(blocks=1, up_blocks=1)
# Limits of the RMS error of a chunk's mel, relative to the RMS of the mel of the plain form in float32.
BOUNDS = [(torch.float32, 1e-4), (torch.float16, 3e-3), (torch.bfloat16, 3e-2)]
TF32 = 1e-3  # the same of CosyVoice3's flow in float32, where cuDNN may multiply in TF32
INT8 = 2e-3  # the same over keys and values in 8 bits


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def ready(network):
    """The network on the GPU, with random weights that keep signals in range."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            noise *= parameter[0].numel() ** -0.5
        elif name.endswith("alpha") or ("norm" in name and name.endswith("weight")):
            noise = 1 + 0.1 * noise.abs()
        else:
            noise *= 0.1
        parameter.data = noise.to(parameter.dtype)
    return network.cuda().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def dit() -> DiTFlow:
    return ready(DiTFlow(DiTFlowConfig(encoder=ENCODER, estimator=DiTConfig(depth=2))))


@pytest.fixture(scope="module")
def unet() -> UNetFlow:
    return ready(UNetFlow(UNetFlowConfig(encoder=ENCODER, estimator=UNetConfig(mid_stages=1, blocks=2))))


@pytest.fixture(scope="module")
def rotary() -> CosyVoice3Flow:
    return ready(CosyVoice3Flow(CosyVoice3FlowConfig(estimator=RotaryDiTConfig(depth=2))))


def streaming(network: Any, **options: Any) -> CachedStreaming | UNetStreaming:
    """A flow on the GPU, with the limits of its stack."""
    stack = stacks.UNET if isinstance(network, UNetFlow) else stacks.DIT
    stack = stacks.COSYVOICE3 if isinstance(network, CosyVoice3Flow) else stack
    limits = replace(options.pop("limits"), chunk_boundary=stack.chunk_boundary)
    given = {"steps": STEPS, "limits": limits, **options}
    if isinstance(network, UNetFlow):
        return UNetStreaming(network, flow_noise("cuda"), **given)
    kind: Any = DiTStreaming if isinstance(network, DiTFlow) else CosyVoice3Streaming
    return kind(network, flow_noise("cuda"), PromptCaches(1 << 33), **given)


def prompts() -> list[Prompt]:
    """The second voice is an x-vector alone."""
    return [prompt(tokens, tokens, 6561, 192) for tokens in (40, 0, 25)]


def opened(flow: CachedStreaming | UNetStreaming, prompt: Prompt) -> Stream:
    return flow.open(prompt, VocoderState(0))


def worst_error(plain, fused, hops: list[tuple[int, int, int]]) -> float:
    """Largest error over batches of three streams with different voices, histories and chunk lengths."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 6561, (3, 400))
    streams = [[opened(flow, prompt) for prompt in prompts()] for flow in (plain, fused)]
    at, errors = np.zeros(3, int), []
    for batch in hops:
        ends = at + batch
        begins = np.zeros(3, int) if plain.cumulative else at
        parts = [row[begin : end + LOOKAHEAD_TOKENS] for row, begin, end in zip(tokens, begins, ends, strict=True)]
        expected, actual = (
            [
                mel.clone()
                for mel in flow.render([flow.chunk(s, part, final=False) for s, part in zip(of, parts, strict=True)])
            ]
            for flow, of in zip((plain, fused), streams, strict=True)
        )
        errors += [relative_error(*pair) for pair in zip(actual, expected, strict=True)]
        at = ends
    return max(errors)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("kind", ["dit", "rotary"])
@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_a_flow_that_keeps_its_past_on_a_gpu_equals_its_plain_form_up_to_rounding(
    kept: str, kind: str, dtype: torch.dtype, bound: float, request: pytest.FixtureRequest
) -> None:
    """Ring buffers wrap around; batch sizes are between and above those of the graphs; chunks end anywhere."""
    network, limits = request.getfixturevalue(kind), BatchLimits(max_streams=3)
    plain = streaming(network, limits=limits, graphs=False)
    fused = streaming(copy.deepcopy(network).to(dtype), limits=limits, kv_cache_dtype=kept)
    assert isinstance(plain._solve, GatheredSolve) and isinstance(fused._solve, GraphedSolve)
    bound = max(bound, TF32 if kind == "rotary" else 0, INT8 if kept == "int8" else 0)
    assert worst_error(plain, fused, [(15, 15, 15), (25, 4, 22), (100, 60, 1), (104, 110, 30)]) < bound


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("kind", ["dit", "rotary"])
def test_voices_prefilled_together_on_a_gpu_equal_each_in_plain_form(kind, dtype, bound, request) -> None:
    """More voices than a graph holds, of different lengths."""
    network, limits = request.getfixturevalue(kind), BatchLimits(max_streams=3)
    plain = streaming(network, limits=limits, graphs=False)
    fused = streaming(copy.deepcopy(network).to(dtype), limits=limits).for_worker(FIRST_CHUNK_WORKER)
    assert fused is not None
    bound = max(bound, TF32 if kind == "rotary" else 0)
    voices = [replace(prompt, embedding=prompt.embedding + shift) for shift in range(3) for prompt in prompts()]
    fused.prefill(voices)
    assert [fused.prefill_frames(voice) for voice in voices] == [0] * len(voices)
    for voice in voices:
        ours, theirs = opened(fused, voice), opened(plain, voice)
        if ours.prompt.frames:
            pairs = [(getattr(of.prompt.attention, name) for of in (ours, theirs)) for name in ("keys", "values")]
            pairs.append((ours.prompt.history, theirs.prompt.history))
            assert max(relative_error(*pair) for pair in pairs) < bound
        fused.close(ours)
        plain.close(theirs)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_a_flow_of_windows_on_a_gpu_equals_its_plain_form_up_to_rounding(unet, dtype, bound) -> None:
    """Streams become longer than the context window."""
    options: dict[str, Any] = {"limits": BatchLimits(max_streams=3), "context_tokens": 50}
    plain = streaming(unet, graphs=False, **options)
    fused = streaming(copy.deepcopy(unet).to(dtype), **options)
    assert isinstance(plain._solve, PlainWindowSolve) and isinstance(fused._solve, GraphedWindowSolve)
    assert worst_error(plain, fused, [(10, 18, 25), (25, 5, 25), (50, 60, 50), (100, 2, 100)]) < bound


@pytest.fixture(scope="module")
def hift() -> HiFTGenerator:
    network = ready(HiFTGenerator(HiFTConfig(channels=64, f0_channels=64)))
    with torch.no_grad():
        network.conv_post.weight *= 0.1
        network.f0_predictor.classifier.bias += 200.0  # Hz: voiced
    return network


def engine(flow: DiTFlow, hift: HiFTGenerator, dtype: torch.dtype, streams: int = 4) -> Token2Wav:
    """By graphs in float16, without them in float32."""
    graphs, limits = dtype == torch.float16, BatchLimits(max_streams=streams)
    served, body = copy.deepcopy(flow).to(dtype), copy.deepcopy(hift).body_to(dtype)
    caches, noise = PromptCaches(1 << 33), source_noise(hift.config.harmonics + 1, "cuda")
    streaming = DiTStreaming(
        served, flow_noise("cuda"), caches, limits=limits, steps=STEPS, graphs=graphs, load_exact=lambda: flow
    )
    vocoder = StreamingVocoder(body, noise, limits=limits, graphs=graphs, load_exact=lambda: hift)
    return Token2Wav(streaming, vocoder, "cuda")


def spoken(engine: Token2Wav, spoil: Callable[[Any], None] = lambda stream: None, speed: float = 1.0) -> list[Tensor]:
    """The audio of three streams. `spoil` is called with the third one before their second chunks."""
    tokens, parts = np.random.default_rng(0).integers(0, 6561, (3, 100)), []
    streams = [engine.open(prompt, speed) for prompt in prompts()]
    for begin, end in ((0, 20), (20, 50), (50, 90)):
        ahead = tokens[:, begin : end + LOOKAHEAD_TOKENS]
        chunks = [engine.chunk(stream, row, final=False) for stream, row in zip(streams, ahead, strict=True)]
        if begin == 20:
            spoil(streams[2])
            torch.cuda.synchronize()  # the engine computes on other streams
        parts.append([torch.from_numpy(audio) for audio in engine.step(chunks)])
    for stream in streams:
        engine.close(stream)
    return [torch.cat(of) for of in zip(*parts, strict=True)]


@torch.inference_mode()
def test_a_chunk_that_is_not_finite_beside_graphs_is_rendered_again(dit: DiTFlow, hift: HiFTGenerator) -> None:
    subject: Any = engine(dit, hift, torch.float16)
    expected = spoken(subject)
    in_ring = spoken(subject, lambda stream: subject._flow._pool.keys[stream.cache.slot].fill_(torch.nan))
    in_voice = spoken(subject, lambda stream: stream.prompt.attention.keys.fill_(torch.nan))
    for of_stream in zip(expected, in_ring, in_voice, strict=True):
        assert all(relative_error(audio, of_stream[0]) < 0.1 for audio in of_stream)
    assert subject.counts[RETRIED] == 2 and subject.counts[FAILED] == 0


@torch.inference_mode()
def test_streams_of_any_speed_are_vocoded_by_graphs(dit: DiTFlow, hift: HiFTGenerator, caplog) -> None:
    subject = engine(dit, hift, torch.float16)
    usual = spoken(subject)
    for speed in (0.25, 0.7, 1.5):
        for audio, at_1 in zip(spoken(subject, speed=speed), usual, strict=True):
            assert audio.isfinite().all() and len(audio) == pytest.approx(len(at_1) / speed, rel=0.2)
    assert "beyond the largest CUDA graph" not in caplog.text


def test_first_chunks_are_the_same_beside_other_batches(dit: DiTFlow, hift: HiFTGenerator) -> None:
    """And so are those batches: both workers have graphs, streams and results of their own. New voices are prefilled
    meanwhile."""
    subject = engine(dit, hift, torch.float16, streams=24)
    tokens, made = np.random.default_rng(0).integers(0, 6561, (8, 400)), prompts()

    def first(row: int, worker: int = 0) -> np.ndarray:
        stream = subject.open(made[row % 3])
        chunk = subject.chunk(stream, tokens[row, : 15 + LOOKAHEAD_TOKENS], final=False)
        assert subject.is_first_chunk(chunk)
        (audio,) = subject.step([chunk], worker)
        subject.close(stream)
        return audio

    def whole() -> list[list[np.ndarray]]:
        streams, audio = [subject.open(made[row % 3]) for row in range(8)], []
        for begin in range(0, 300, 50):
            ahead = tokens[:, begin : begin + 50 + LOOKAHEAD_TOKENS]
            chunks = [subject.chunk(stream, row, final=False) for stream, row in zip(streams, ahead, strict=True)]
            audio.append(subject.step(chunks))
        for stream in streams:
            subject.close(stream)
        return audio

    assert subject.workers == 2
    alone, firsts = whole(), [first(row, FIRST_CHUNK_WORKER) for row in range(8)]
    for row in range(8):
        assert relative_error(torch.tensor(firsts[row]), torch.tensor(first(row))) < 0.1
    with ThreadPoolExecutor(1) as pool:
        batches = pool.submit(lambda: [whole() for _ in range(6)])
        rounds = 0
        while not batches.done():
            assert all(np.array_equal(first(row, FIRST_CHUNK_WORKER), firsts[row]) for row in range(8))
            stranger = replace(made[0], embedding=made[0].embedding + rounds)
            subject.close(subject.open(stranger))
            rounds += 1
    assert rounds > 3
    for audio in batches.result():
        for ours, theirs in zip(chain(*audio), chain(*alone), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_the_graphs_of_first_chunks_are_urgent_and_each_worker_has_a_stream_of_its_own() -> None:
    others, firsts, again = (_capture_stream(0, worker) for worker in (0, FIRST_CHUNK_WORKER, 0))
    assert others is again and others != firsts and firsts.priority < others.priority


@torch.inference_mode()
def test_a_result_stays_until_its_own_function_is_replayed(dit: DiTFlow) -> None:
    """All graphs compute in the same memory: each leaves its result where no other one writes."""
    makers = [lambda *size: (torch.zeros(size, device="cuda"),)] * 2
    sizes = [(4, 1 << 20), (1, 1 << 20), (2, 1 << 18)]
    doubled, shifted = (
        Graphs(function, make, sizes, name)
        for function, make, name in zip(
            (lambda x: (x * 3).sin() * 2, lambda x: (x + 1).cos() + x.flip(0)), makers, ("one", "two"), strict=True
        )
    )
    for size in sizes:
        values = torch.randn(size, device="cuda")
        kept = doubled.run(size, values)
        for other in sizes:
            shifted.run(other, torch.randn(other, device="cuda"))
        torch.testing.assert_close(kept, (values * 3).sin() * 2)


def spoken_on(device: str, stack: stacks.Stack, directory: Path) -> np.ndarray:
    """The audio of a stream, rendered in another thread than the one that loads, as the service does it."""
    # torch captures on one stream for the whole process, of the first GPU. A model's process has one GPU, this one two.
    torch.cuda.graph.default_capture_stream = None
    limits, precision = BatchLimits(max_streams=2), Precision.named("float16", "float16", device)
    engine = Token2Wav.load(stack, directory, device=device, limits=limits, precision=precision)

    def render() -> np.ndarray:
        engine.warm_up()
        voice, tokens = engine.sample(60)
        stream = engine.open(voice)
        (audio,) = engine.step([engine.chunk(stream, tokens, final=True)])
        engine.close(stream)
        return audio

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(render).result()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; run on a machine with two GPUs")
@pytest.mark.parametrize("stack", stacks.BUILT_IN[:2], ids=lambda stack: stack.name)
def test_the_second_gpu_gives_the_audio_of_the_first_and_takes_nothing_of_it(
    stack: stacks.Stack, demo_files: Path
) -> None:
    taken = torch.cuda.memory_reserved(0)
    directory = demo_files / stack.checkpoint
    second = spoken_on("cuda:1", stack, directory)
    assert torch.cuda.memory_reserved(0) <= taken and torch.cuda.memory_reserved(1) > 0
    np.testing.assert_allclose(second, spoken_on("cuda:0", stack, directory), atol=1e-3)
