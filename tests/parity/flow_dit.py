"""Fixtures of Step-Audio2's flow: chunk-wise encoder, DiT estimator, and the flow offline and streamed.

Stored caches have upstream's layouts; the functions at the end convert ours to them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from cosyvoice_triton.checkpoint import load_strict, shapes_of
from cosyvoice_triton.constants import TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.cache import EstimatorCache, KeyValues
from cosyvoice_triton.networks.flow.config import DiTFlowConfig
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

from tests.parity.fixture import Check, Fixture
from tests.parity.flow_unet import estimator_calls
from tests.parity.reference import dit_flow as reference
from tests.parity.reference.encoder import EncoderStream, encode_whole
from tests.parity.served import ServedFlow, caches_of, prompt_of
from tests.parity.tracing import evaluate, recorded

Results = Iterator[tuple[str, Tensor]]


def build(fixture: Fixture, file: str | None = None) -> DiTFlow:
    """The flow in a weights file of the fixture."""
    state = fixture.weights(file)
    return load_strict(DiTFlow(DiTFlowConfig.from_shapes(shapes_of(state))), state, "cpu", torch.float32)


def check_encoder(fixture: Fixture) -> Results:
    encoder = build(fixture).encoder
    streams = {"none": EncoderStream(encoder)}  # after a call
    for call in fixture.meta["calls"]:
        if "last_chunk" not in call:
            xs, lengths = (fixture[key] for key in re.findall(r"in/\w+", call["fn"]))
            ys, valid = encode_whole(encoder, xs, lengths)
            yield from zip(call["outputs"], (ys, valid.to(torch.uint8)), strict=True)
            continue
        before = streams[call["caches"].removeprefix("from ")]
        streams[call["tag"]] = stream = before.then(evaluate(fixture, call["xs"]), call["last_chunk"])
        new = encoder.config.ratio * (stream.tokens - before.tokens)
        yield from _stored(call["outputs"], {"xs": stream.features()[:, -new:], **stream.caches()})


# Of the large caches a part is stored, which the key names after a dot.
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda cache: cache,
    "layers_first_last": lambda cache: cache[[0, -1]],
    "steps_first_last": lambda cache: cache[[0, -1]],
    "steps_first_last.t40": lambda cache: cache[[0, -1]][..., :40, :],
    "step_last.layer_last": lambda cache: cache[-1, -1],
}


def _stored(keys: Iterable[str], computed: dict[str, Tensor]) -> Results:
    """Results by the last part of their keys, such as `att_cache`, or `att_cache.step_last.layer_last` for a part."""
    for key in keys:
        name, _, part = key.rpartition("/")[2].partition(".")
        if name in computed:
            yield key, PARTS[part](computed[name])


def check_estimator(fixture: Fixture) -> Results:
    estimator: Any = build(fixture).decoder.estimator
    x, mu, condition, speaker, t = (fixture[f"in/{name}"] for name in ("x", "mu", "cond", "spks", "t"))
    streams: dict[str, tuple[EstimatorCache, list[int]]] = {}  # cache after a call, lengths of the blocks in it
    for call in fixture.meta["calls"]:
        if "frames" not in call:
            yield from estimator_calls(fixture, estimator, [call])
            continue
        fresh = estimator.empty_cache(steps=1, rows=x.shape[0])[0], list[int]()
        cache, blocks = streams.get(call["caches"].removeprefix("from "), fresh)
        start, stop = call["frames"]
        cache, blocks = cache.with_room(stop - start), [*blocks, stop - start]
        streams[call["tag"]] = cache, blocks
        part = slice(start, stop)
        y = estimator.forward_chunk(x[..., part], t, mu[..., part], speaker, condition[..., part], cache)
        attention = estimator_attention(cache.attention, blocks)
        yield from _stored(call["outputs"], {"x": y, "cnn_cache": estimator_conv(cache.conv), "att_cache": attention})


def check_offline_flow(fixture: Fixture) -> Results:
    """Rows as long as their batch by the engine, each with its own noise; shorter ones by `reference`, because upstream
    lets them look ahead into their padding."""
    network = build(fixture)
    names = ("token", "token_len", "prompt_feat", "prompt_feat_len", "embedding")
    for call in fixture.meta["calls"]:
        inputs = [fixture[f"in/{name}"][: call["batch"]] for name in names]
        noise = fixture[call["noise"]]
        fixture.computed_by = "reference"
        with recorded(network.encoder_proj, "forward") as projected:
            mel = reference.inference(network, *inputs, noise=noise)
        mu = projected[0]
        for row, (token, count, feat, frames, embedding) in enumerate(zip(*inputs, strict=True)):
            if count == len(token):
                served = ServedFlow(fixture, network, noise[row : row + 1])
                prompt = prompt_of(token, feat[:frames], embedding)
                served.whole(prompt, token[len(prompt.tokens) :])
                mel[row], mu[row] = served.mel[0], served.mu[0]
        yield from zip(call["outputs"], (mel, inputs[1] * network.config.encoder.ratio), strict=True)
        if (key := f"mid/{call['tag']}/mu") in fixture:
            yield key, mu


def _flow_calls(fixture: Fixture, network: DiTFlow) -> Results:
    """A stream (prefill, then chunks) and, in some fixtures, the whole utterance at once, by the engine.

    The engine has no encoder cache: those that upstream's encoder leaves are computed by `reference`.
    """
    encoded = EncoderStream(network.encoder)
    served: ServedFlow | None = None
    blocks: list[int] = []
    for call in fixture.meta["calls"]:
        if call.get("fn", "").startswith("inference("):
            yield call["output"], _whole_utterance(fixture, network, call)
            continue
        token, computed = evaluate(fixture, call["token"]), {}
        if "last_chunk" not in call:
            prompt = _prompt(fixture, network, call, token)
            served, blocks = ServedFlow(fixture, network, fixture["in/rand_noise"]), []
            stream = served.open(prompt)
        else:
            assert served is not None, "a stream has a prefill before its first chunk"
            computed["mel"] = served.chunk(stream, token[0], final=call["last_chunk"])[None]
        encoded = encoded.then(network.input_embedding(token), call.get("last_chunk", False))
        of_stream, history = caches_of(served, stream)
        blocks.append(served.mu.shape[1])
        computed |= {
            "mu": served.mu.transpose(1, 2),  # (B, T, mel) -> (B, mel, T)
            "estimator_cnn_cache": estimator_conv(history),
            "estimator_att_cache": estimator_attention(of_stream, blocks),
        }
        keys = [key for key in fixture.keys if key.split("/")[1] == call["tag"]]
        yield from _stored(keys, computed)
        by_engine, fixture.computed_by = fixture.computed_by, "network"
        yield from _stored(keys, {f"conformer_{name}": cache for name, cache in encoded.caches().items()})
        fixture.computed_by = by_engine


def _prompt(fixture: Fixture, network: DiTFlow, call: dict[str, Any], token: Tensor) -> Prompt:
    """The prompt of a prefill, whose tokens are followed by their look-ahead."""
    feat = fixture[call.get("mel", "in/prompt_feat")]
    prompt = token[:, : feat.shape[1] // TOKEN_MEL_RATIO]
    if not torch.equal(token[:, prompt.shape[1] :], prompt[:, : network.config.encoder.lookahead]):
        raise ValueError(f"{fixture.name}: look-ahead of the prefill is not the head of the prompt")
    return prompt_of(prompt[0], feat[0], fixture[call.get("spk", "in/embedding")][0])


def _whole_utterance(fixture: Fixture, network: DiTFlow, call: dict[str, Any]) -> Tensor:
    """The mel of an utterance with its prompt."""
    prompt_token, token, feat = (fixture[f"in/{name}"] for name in ("prompt_token", "token", "prompt_feat"))
    served = ServedFlow(fixture, network, fixture[call["noise"]])
    served.whole(prompt_of(prompt_token[0], feat[0], fixture["in/embedding"][0]), token[0])
    return served.mel


def estimator_conv(history: Tensor) -> Tensor:
    """(..., 2, rows, C, 2) -> (..., rows, 2 C, 2): channels of the first convolution, then those of the second."""
    return history.transpose(-4, -3).flatten(-3, -2)


def estimator_attention(cache: KeyValues, blocks: list[int]) -> Tensor:
    """(..., H, T, 2 D): keys and values concatenated, the newest of the blocks first, each in time order."""
    in_time = torch.cat([cache.keys, cache.values], dim=-1).split(blocks, dim=-2)
    return torch.cat(in_time[::-1], dim=-2)


CHECKS: dict[str, Check] = {
    "item6a_stepaudio2_encoder": check_encoder,
    "item6b_stepaudio2_dit": check_estimator,
    "item6c_stepaudio2_flow_inference": check_offline_flow,
    "item6d_stepaudio2_flow_streaming": lambda fixture: _flow_calls(fixture, build(fixture)),
    "fullsize_stepaudio2_flow": lambda fixture: _flow_calls(
        fixture, fixture.full_size(lambda: DiTFlow(DiTFlowConfig()))
    ),
}
