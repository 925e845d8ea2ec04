"""Streams in chunks equal the networks' own computation of the whole, for all stacks and divisions into chunks;
CosyVoice3's vocoder over streams, and its files. tests/assets/golden_cosyvoice3 has upstream's values of both."""

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import (
    CONTEXT_TOKENS,
    HOP_SAMPLES,
    LOOKAHEAD_TOKENS,
    STREAM_CACHE_FRAMES,
    TOKEN_MEL_RATIO,
    TOKEN_RATE,
)
from cosyvoice_triton.networks.flow import CosyVoice3Flow, DiTFlow, UNetFlow, load_cosyvoice3_flow
from cosyvoice_triton.networks.flow.base import FlowMatching
from cosyvoice_triton.networks.flow.checkpoint import ROTARY_KEY
from cosyvoice_triton.networks.hift import load_causal_hift, split_weight_norm
from cosyvoice_triton.networks.hift.causal import WITHHELD_FRAMES
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.token2wav.stream import VocoderState
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

from tests.parity.reference import dit_flow, window_flow
from tests.support.streams import Plan, ids, mel, pieces, prompt, saved, spoken, tensors, together, vocoded

NOISE = flow_noise()
GRID = (0.0, 0.1, 0.3, 0.35, 0.8, 1.0)
BOUNDARY = {"dit": 5, "unet": 5, "cosyvoice3": 25}  # chunks of the mask of the small networks; dit has none


def dit_reference(network: DiTFlow, voice: Prompt, tokens: np.ndarray, ends: list[int], steps: int) -> Tensor:
    """Upstream's loop over the chunks. Of a stream's own frames the estimator keeps the last STREAM_CACHE_FRAMES; once
    it is longer than CONTEXT_TOKENS, the encoder begins after the prompt with the last of these, in the chunks in which
    they came."""
    prompt, row, mels = TOKEN_MEL_RATIO * len(voice.tokens), torch.from_numpy(tokens)[None], []
    begun = cache = dit_flow.prefill(network, *tensors(voice), noise=NOISE.read(0, prompt).T[None], steps=steps)
    for index, (offset, end) in enumerate(pairwise([0, *ends])):
        if (first := offset - CONTEXT_TOKENS) > 0:
            encoder = begun.encoder
            for begin, until in pairwise([first, *(at for at in ends[:index] if at > first)]):
                embedded = network.input_embedding(row[:, begin : until + LOOKAHEAD_TOKENS])
                encoder = encoder.then(embedded, final=False)
            cache = replace(cache, encoder=encoder)
        final = end == len(tokens)
        chunk = row[:, offset : end + (0 if final else LOOKAHEAD_TOKENS)]
        noise = NOISE.read(prompt + TOKEN_MEL_RATIO * offset, TOKEN_MEL_RATIO * (end - offset)).T[None]
        mel, cache = dit_flow.inference_chunk(network, chunk, cache, final=final, noise=noise)
        cache = cache.trimmed(STREAM_CACHE_FRAMES)
        mels.append(mel[0])
    return torch.cat(mels, dim=1)


def window_reference(
    network: UNetFlow | CosyVoice3Flow, voice: Prompt, tokens: np.ndarray, _: list[int], steps: int, **seen: Tensor
) -> Tensor:
    """The utterance at once under the training masks, or under `seen` (1, T, T)."""
    noise = NOISE.read(0, TOKEN_MEL_RATIO * (len(voice.tokens) + len(tokens))).T[None]  # (T, C) -> (1, C, T)
    options: dict[str, Any] = {"noise": noise, "streaming": True, "final": True, "steps": steps, **seen}
    return window_flow.inference(network, torch.from_numpy(tokens)[None], *tensors(voice), **options)[0]


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "dit": dit_reference,
    "unet": window_reference,
    "cosyvoice3": window_reference,
}


@pytest.fixture(params=REFERENCES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(kind: str, request: pytest.FixtureRequest) -> Token2Wav:
    return request.getfixturevalue(kind)


@pytest.mark.parametrize(("chunks", "rest"), [([], 40), ([2, 1, 2], 3), ([1, 4], 21)], ids=["one", "tail", "growing"])
@torch.inference_mode()
def test_chunks_that_end_on_boundaries_equal_the_whole_after_a_prompt_of_any_length(kind, engine, chunks, rest) -> None:
    """Boundaries count from the prompt's start."""
    flow, boundary = engine._flow, BOUNDARY[kind]
    for voice in (0, 3, 8, 25, 27, 28, 53, 75):
        hops = [count * boundary for count in chunks]
        if hops:
            hops[0] += boundary - voice % boundary
        spoken_in, tokens = prompt(4, voice), ids(4, sum(hops) + rest)
        expected = REFERENCES[kind](flow._network, spoken_in, tokens, [*np.cumsum(hops), len(tokens)], flow._steps)
        streamed = mel(flow, spoken_in, tokens, hops)
        torch.testing.assert_close(streamed, expected, atol=1e-4, rtol=0)
        if hops and kind != "dit" and voice == 8:  # and under the mask one that ends elsewhere does not
            elsewhere = mel(flow, spoken_in, tokens, [hops[0] - 1, *hops[1:]])
            assert (elsewhere - expected).abs().max() > 1e-2


@pytest.mark.parametrize("guidance", [0.0, 0.7])
@torch.inference_mode()
def test_few_steps_on_a_grid_of_their_own_equal_the_reference(kind, engine, flow_of, guidance) -> None:
    """Without guidance there are half as many rows, and half as many keys and values are kept."""
    network = copy(engine._flow._network)
    network._modules = {**network._modules, "decoder": FlowMatching(network.decoder.estimator, guidance, GRID)}
    steps = len(GRID) - 1
    flow = flow_of(kind, network=network, steps=steps)
    voice, tokens, hops = prompt(4, 25), ids(4, 45), [25]
    expected = REFERENCES[kind](network, voice, tokens, [25, 45], steps)
    torch.testing.assert_close(mel(flow, voice, tokens, hops), expected, atol=1e-4, rtol=0)
    if kind != "unet":
        assert flow._pool.keys.shape[1:4:2] == (steps, network.decoder.rows) == (5, 2 if guidance else 1)


@pytest.mark.parametrize("prompt_tokens", [12, 0])
@torch.inference_mode()
def test_the_dit_equals_its_reference_also_after_frames_leave_the_cache(dit: Token2Wav, prompt_tokens: int) -> None:
    hops, voice, tokens = [20, 25, 30, 60, 3], prompt(4, prompt_tokens), ids(4, 160)
    expected = dit_reference(dit._flow._network, voice, tokens, [*np.cumsum(hops), 160], dit._flow._steps)
    torch.testing.assert_close(mel(dit._flow, voice, tokens, hops), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_chunks_that_end_elsewhere_leave_nothing_behind_that_later_ones_would_see(cosyvoice3: Token2Wav) -> None:
    """What is rendered of a chunk of the mask before it is whole differs, what comes after it does not."""
    flow, voice, tokens = cosyvoice3._flow, prompt(0, tokens=13), ids(0, 80)
    streamed = mel(flow, voice, tokens, [5, 9, 4, 3, 30, 2, 17])
    expected = window_reference(flow._network, voice, tokens, [], flow._steps)
    last = TOKEN_MEL_RATIO * 70  # tokens are rendered before the final chunk
    assert (streamed - expected)[:, : TOKEN_MEL_RATIO * 5].abs().max() > 0.01
    torch.testing.assert_close(streamed[:, last:], expected[:, last:], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_long_stream_attends_to_its_prompt_and_the_most_recent_frames_only(cosyvoice3_network, flow_of) -> None:
    """As the network itself under the mask of what each chunk saw, with the positions of the whole utterance."""
    flow = flow_of("cosyvoice3", steps=1, cache_frames=70)
    voice, tokens, mels, row = prompt(0, tokens=30), ids(0, 195), [], []
    stream, begin = flow.open(voice, VocoderState(0)), 2 * 30
    frames = torch.arange(2 * (30 + 195))
    seen = frames // 50 <= frames[:, None] // 50
    for piece in pieces(flow, tokens, [20, 25, 50, 50]):
        chunk = piece.of(flow, stream)
        first, end = stream.prompt.frames + stream.cache.total, begin + chunk.frames
        assert chunk.computed == (end - first) // TOKEN_MEL_RATIO
        seen[first:end, stream.prompt.frames : max(stream.prompt.frames, first - 70)] = False
        mels += flow.render([chunk])
        row.append(chunk.computed)
        begin = end
    assert row[1:-1] == [25, 50, 50]
    expected = window_reference(cosyvoice3_network, voice, tokens, [], 1, seen=seen[None])
    torch.testing.assert_close(torch.cat(mels, dim=1), expected, atol=1e-4, rtol=0)


def test_a_batch_of_streams_equals_each_stream_alone(engine: Token2Wav) -> None:
    """Voices, histories and chunk sizes differ; streams begin and end in different batches. Two have no prompt."""
    plans = [
        Plan(prompt(seed, length), pieces(engine, ids(seed, 70), [10 + seed, 30, 4 * seed + 1]), begin=seed)
        for seed, length in enumerate((0, 10, 11, 0, 13))
    ]
    alone = [spoken(engine, plan.voice, plan.pieces) for plan in plans]
    assert np.abs(alone[0] - alone[1]).max() > 1e-3
    for audio, whole in zip(together(engine, plans), alone, strict=True):
        np.testing.assert_allclose(audio, whole, atol=1e-3)


@pytest.mark.slow
@torch.inference_mode()
def test_a_long_stream_of_the_unet_forgets_whole_training_chunks(unet_network, flow_of) -> None:
    """As if its prompt were followed by the tokens that it has not forgotten; every frame has the noise of its place
    in the whole stream. The small network's training chunk is 5 tokens."""
    voice, tokens, hops = prompt(1, tokens=8), ids(1, 30 * TOKEN_RATE), [17, 360, 40, 200]
    flow, P = flow_of("unet", steps=1), 2 * len(voice.tokens)
    stream, ends = flow.open(voice, VocoderState(0)), [*np.cumsum(hops).tolist(), len(tokens)]
    for piece, end, forgotten in zip(pieces(flow, tokens, hops), ends, (0, 0, 5, 45, 245), strict=True):
        (mel,) = flow.render([piece.of(flow, stream)])
        if forgotten:
            own = NOISE.read(P + TOKEN_MEL_RATIO * forgotten, TOKEN_MEL_RATIO * (end - forgotten))
            (expected,) = window_flow.inference(
                unet_network,
                torch.from_numpy(tokens[forgotten : end + LOOKAHEAD_TOKENS])[None],
                *tensors(voice),
                noise=torch.cat([NOISE.read(0, P), own]).T[None],
                streaming=True,
                final=piece.final,
                steps=1,
            )
            torch.testing.assert_close(mel, expected[:, -mel.shape[1] :], atol=1e-4, rtol=0)


LIMITS = BatchLimits(max_streams=4)
AUDIO = 1e-4  # largest difference of streamed audio from the whole's, which is in -0.99..0.99


FLOAT32 = Precision(torch.float32, torch.float32)


def mels(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(80, length, generator=generator) for length in lengths]


@pytest.mark.parametrize(
    "schedules",
    [
        ((30, 50, 100, 28), (60, 3, 1, 2, 44)),  # batches of rows of other lengths; one ends while the other goes on
        ((8, 1, 1, 70), (7, 1, 2, 5)),  # as early as possible, and too early
        ((40, 0), (3,)),  # nothing new at the end; shorter than what is withheld
    ],
)
def test_audio_in_chunks_equals_that_of_the_whole_mel(causal_vocoder, schedules):
    whole = mels(*map(sum, schedules))
    for parts, expected in zip(vocoded(causal_vocoder, whole, schedules), causal_vocoder.whole(whole), strict=True):
        assert len(expected) % HOP_SAMPLES == 0 and expected.abs().max() > 0.01
        torch.testing.assert_close(torch.cat(parts), expected, atol=AUDIO, rtol=0)


def test_a_chunk_gives_all_but_the_audio_that_later_frames_change(causal_vocoder):
    (parts,) = vocoded(causal_vocoder, mels(60), [(20, 10, 30)])
    half = causal_vocoder._network.config.n_fft // 2
    assert [len(part) for part in parts] == [
        HOP_SAMPLES * (20 - WITHHELD_FRAMES) - half,
        HOP_SAMPLES * 10,
        HOP_SAMPLES * (30 + WITHHELD_FRAMES) + half,
    ]


def test_long_audio_in_chunks_keeps_the_phase_of_the_whole(causal_vocoder):
    """Pitch is integrated into phase over the whole stream, which no rounding may move."""
    (whole,) = mels(600)
    (parts,) = vocoded(causal_vocoder, [whole], [(30, *[50] * 11, 20)])
    end, expected = (audio[-100 * HOP_SAMPLES :] for audio in (torch.cat(parts), causal_vocoder.whole([whole])[0]))
    torch.testing.assert_close(end, expected, atol=AUDIO, rtol=0)


def test_the_pitch_is_computed_in_float64(causal_vocoder, tmp_path):
    causal_hift = causal_vocoder._network
    assert {parameter.dtype for parameter in causal_hift.f0_predictor.parameters()} == {torch.float64}
    state = split_weight_norm(causal_hift.state_dict())
    torch.save({f"generator.{key}": tensor.float() for key, tensor in state.items()}, tmp_path / "hift.pt")
    loaded = load_causal_hift(tmp_path / "hift.pt").body_to(torch.float16)
    assert {parameter.dtype for parameter in loaded.f0_predictor.parameters()} == {torch.float64}
    assert loaded.conv_pre.weight.dtype == torch.float16
    torch.testing.assert_close(loaded.f0_predictor.classifier.weight, causal_hift.f0_predictor.classifier.weight)


@pytest.fixture
def checkpoint(cosyvoice3_network, causal_vocoder, tmp_path):
    return saved(tmp_path, cosyvoice3_network, deepcopy(causal_vocoder._network).float())


def test_the_flow_is_loaded_strictly_and_its_positions_stay_exact_in_every_precision(cosyvoice3_network, checkpoint):
    path = checkpoint / "flow.pt"
    loaded, state = load_cosyvoice3_flow(path, dtype=torch.bfloat16), torch.load(path)
    assert loaded.config == cosyvoice3_network.config
    assert loaded.decoder.estimator.proj_out.weight.dtype == torch.bfloat16
    for change, message in (
        ({"stray": torch.zeros(1)}, "unexpected: stray"),
        ({ROTARY_KEY: torch.ones(4)}, r"inv_freq is not 10000\^"),
    ):
        torch.save(state | change, path)
        with pytest.raises(ValueError, match=message):
            load_cosyvoice3_flow(path)


@pytest.fixture
def load(checkpoint):
    return partial(Token2Wav.load, stacks.COSYVOICE3, checkpoint, device="cpu", limits=LIMITS, steps=2)


def test_the_engine_of_the_stack_loads_the_official_files(load, cosyvoice3):
    audio, expected = (each.whole(prompt(3), ids(3, 40)) for each in (load(precision=FLOAT32), cosyvoice3))
    np.testing.assert_allclose(audio, expected, atol=1e-3)


def test_the_engine_keeps_keys_and_values_in_eight_bits(load):
    kept, rounded = (load(precision=FLOAT32, kv_cache_dtype=of).cache_bytes for of in ("auto", "int8"))
    assert 0.25 < rounded / kept < 0.5


def test_another_runtime_than_torch_is_refused(load):
    with pytest.raises(ValueError, match="flow_runtime 'onnxruntime': the flow of the stack 'cosyvoice3' runs in tor"):
        load(precision=FLOAT32, runtime="onnxruntime")
