"""Fixtures of Step-Audio2's flow: chunk-wise encoder, DiT estimator, and the flow offline and streamed.

Stored caches have upstream's layouts; the functions at the end convert ours to them.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.checkpoint import load_strict, shapes_of
from common.flow.cache import EstimatorCache, KeyValues
from common.flow.config import DiTConfig, DiTFlowConfig, EncoderConfig
from common.flow.dit import DiTEstimator, DiTFlow
from common.flow.encoder import UpsampleConformerEncoder
from tools.parity.fixture import Check, Fixture, prefixed
from tools.parity.reference import dit_flow as reference
from tools.parity.reference.dit_flow import DiTFlowCache
from tools.parity.reference.encoder import EncoderCache, encode_chunk, encode_whole
from tools.parity.tracing import evaluate, intermediates, steps_of

Results = Iterator[tuple[str, Tensor]]


def build(fixture: Fixture, file: str | None = None) -> DiTFlow:
    """The flow in a weights file of the fixture; guidance is from the JSON next to it."""
    state, config = fixture.weights(file), fixture.weights_meta(file)["config"]
    sizes = replace(DiTFlowConfig.from_shapes(shapes_of(state)), guidance=config["cfm"]["inference_cfg_rate"])
    return load_strict(DiTFlow(sizes), state, "cpu", torch.float32)


def check_encoder(fixture: Fixture) -> Results:
    state = fixture.weights()
    encoder = UpsampleConformerEncoder(EncoderConfig.from_shapes(prefixed("encoder.", state)))
    load_strict(encoder, state, "cpu", torch.float32)
    caches: dict[str, EncoderCache] = {}
    for call in fixture.meta["calls"]:
        if "last_chunk" not in call:
            xs, lengths = (fixture[key] for key in re.findall(r"in/\w+", call["fn"]))
            ys, valid = encode_whole(encoder, xs, lengths)
            yield from zip(call["outputs"], (ys, valid.to(torch.uint8)), strict=True)
            continue
        xs = evaluate(fixture, call["xs"])
        cache = EncoderCache.empty(encoder, xs.shape[0]) if call["caches"] == "none" else caches[_origin(call)]
        ys, cache = encode_chunk(encoder, xs, cache, call["last_chunk"])
        caches[call["tag"]] = cache
        yield from _stored(
            call["outputs"], {"xs": ys, "cnn_cache": encoder_conv(cache), "att_cache": encoder_attention(cache)}
        )


def _origin(call: dict[str, Any]) -> str:
    """Tag of the call whose caches this call continues: "chunk0" of "from chunk0"."""
    return call["caches"].removeprefix("from ")


def _stored(keys: Iterable[str], computed: dict[str, Tensor]) -> Results:
    """Results by the last part of their keys, such as `att_cache`, or `att_cache.step_last` for a part of it."""
    for key in keys:
        name, *parts = key.rpartition("/")[2].split(".")
        if name in computed:
            yield key, _part(computed[name], parts)


def check_estimator(fixture: Fixture) -> Results:
    state = fixture.weights()
    estimator = DiTEstimator(DiTConfig.from_shapes(prefixed("decoder.estimator.", state)))
    load_strict(estimator, state, "cpu", torch.float32)
    x, mu, condition, speaker, t = (fixture[f"in/{name}"] for name in ("x", "mu", "cond", "spks", "t"))
    streams: dict[str, tuple[EstimatorCache, list[int]]] = {}  # cache after a call, lengths of the blocks in it
    for call in fixture.meta["calls"]:
        if "frames" not in call:
            yield from _whole_estimate(fixture, estimator, call)
            continue
        fresh = not call["caches"].startswith("from ")
        cache, blocks = (_empty_cache(estimator, x), []) if fresh else streams[_origin(call)]
        start, stop = call["frames"]
        cache, blocks = cache.with_room(stop - start), [*blocks, stop - start]
        streams[call["tag"]] = cache, blocks
        part = slice(start, stop)
        y = estimator.forward_chunk(x[..., part], t, mu[..., part], speaker, condition[..., part], cache)
        attention = estimator_attention(cache.attention, blocks)
        yield from _stored(call["outputs"], {"x": y, "cnn_cache": estimator_conv(cache), "att_cache": attention})


def _whole_estimate(fixture: Fixture, estimator: DiTEstimator, call: dict[str, Any]) -> Results:
    x, mask, mu, t, speaker, condition = (fixture[key] for key in call["args"])
    with intermediates(estimator, fixture, call["tag"]) as found:
        yield call["output"], estimator(x, t, mu, speaker, condition, mask.bool())
    yield from found.items()


def _empty_cache(estimator: DiTEstimator, x: Tensor) -> EstimatorCache:
    return estimator.empty_cache(steps=1, rows=x.shape[0])[0]


def check_offline_flow(fixture: Fixture) -> Results:
    flow = build(fixture)
    names = ("token", "token_len", "prompt_feat", "prompt_feat_len", "embedding")
    for call in fixture.meta["calls"]:
        inputs = [fixture[f"in/{name}"][: call["batch"]] for name in names]
        mu: list[Tensor] = []
        hook = flow.encoder_proj.register_forward_hook(lambda module, args, output, mu=mu: mu.append(output))
        mel = reference.inference(flow, *inputs, noise=fixture[call["noise"]], steps=call["n_timesteps"])
        hook.remove()
        yield from zip(call["outputs"], (mel, inputs[1] * flow.config.encoder.ratio), strict=True)
        if (key := f"mid/{call['tag']}/mu") in fixture:
            yield key, mu[0]


def check_streamed_flow(fixture: Fixture) -> Results:
    yield from _flow_calls(fixture, build(fixture))


def check_full_size_flow(fixture: Fixture) -> Results:
    with torch.device("meta"):
        flow = DiTFlow(DiTFlowConfig())
    state = fixture.generated_weights({key: tuple(shape) for key, shape in shapes_of(flow.state_dict()).items()})
    yield from _flow_calls(fixture, load_strict(flow, state, "cpu", torch.float32))


def _flow_calls(fixture: Fixture, flow: DiTFlow) -> Results:
    """Streams (prefill, then chunks) and, in some fixtures, the whole utterance at once."""
    cache: DiTFlowCache | None = None
    blocks: list[int] = []
    for call in fixture.meta["calls"]:
        tag = call["tag"]
        if call.get("fn", "").startswith("inference("):
            yield call["output"], _whole_utterance(fixture, flow, call)
            continue
        mu: list[Tensor] = []
        hook = flow.encoder_proj.register_forward_hook(lambda module, args, output, mu=mu: mu.append(output))
        mel = None
        if "last_chunk" in call:
            assert cache is not None, "a stream has a prefill before its first chunk"
            mel, cache = _chunk(fixture, flow, call, cache)
        else:
            cache, blocks = _prefill(fixture, flow, call), []
        hook.remove()
        blocks.append(mu[0].shape[1])
        computed = {
            "mu": mu[0].transpose(1, 2),  # (B, T, mel) -> (B, mel, T)
            "conformer_cnn_cache": encoder_conv(cache.encoder),
            "conformer_att_cache": encoder_attention(cache.encoder),
            "estimator_cnn_cache": estimator_conv(cache.estimator),
            "estimator_att_cache": estimator_attention(cache.estimator.attention, blocks),
        }
        if mel is not None:
            computed["mel"] = mel
        yield from _stored((key for key in fixture.keys if key.split("/")[1] == tag), computed)


def _prefill(fixture: Fixture, flow: DiTFlow, call: dict[str, Any]) -> DiTFlowCache:
    token, feat = evaluate(fixture, call["token"]), fixture[call.get("mel", "in/prompt_feat")]
    frames = feat.shape[1]
    prompt = token[:, : frames // flow.config.encoder.ratio]
    if not torch.equal(token[:, prompt.shape[1] :], prompt[:, : flow.config.encoder.lookahead]):
        raise ValueError(f"{fixture.name}: look-ahead of the prefill is not the head of the prompt")
    embedding = fixture[call.get("spk", "in/embedding")]
    return reference.prefill(
        flow, prompt, feat, embedding, noise=fixture["in/rand_noise"], steps=steps_of(fixture, call)
    )


def _chunk(fixture: Fixture, flow: DiTFlow, call: dict[str, Any], cache: DiTFlowCache) -> tuple[Tensor, DiTFlowCache]:
    token, final = evaluate(fixture, call["token"]), call["last_chunk"]
    frames = (token.shape[1] - (0 if final else flow.config.encoder.lookahead)) * flow.config.encoder.ratio
    noise = fixture["in/rand_noise"][:, :, cache.frames : cache.frames + frames]
    return reference.inference_chunk(flow, token, cache, final=final, noise=noise)


def _whole_utterance(fixture: Fixture, flow: DiTFlow, call: dict[str, Any]) -> Tensor:
    token = torch.cat([fixture["in/prompt_token"], fixture["in/token"]], dim=1)
    feat = fixture["in/prompt_feat"]
    token_len, feat_len = (torch.full(x.shape[:1], x.shape[1]) for x in (token, feat))
    noise, steps = fixture[call["noise"]], steps_of(fixture, call)
    return reference.inference(
        flow, token, token_len, feat, feat_len, fixture["in/embedding"], noise=noise, steps=steps
    )


def encoder_conv(cache: EncoderCache) -> Tensor:
    """(B, C, 2 + 2 * ratio): histories of both convolutions, concatenated."""
    return torch.cat([cache.lookahead, cache.upsample], dim=2)


def encoder_attention(cache: EncoderCache) -> Tensor:
    """(layers, B, H, frames, 2 D): keys and values concatenated, the layers at token rate repeated to mel rate."""
    tokens, frames = (torch.cat([kv.keys, kv.values], dim=-1) for kv in (cache.tokens, cache.frames))
    ratio = frames.shape[3] // tokens.shape[3]
    return torch.cat([tokens.repeat(1, 1, 1, ratio, 1), frames])


def estimator_conv(cache: EstimatorCache) -> Tensor:
    """(..., rows, 2 C, 2): channels of the first convolution, then those of the second."""
    return cache.conv.transpose(-4, -3).flatten(-3, -2)  # (..., 2, rows, C, 2) -> (..., rows, 2 C, 2)


def estimator_attention(cache: KeyValues, blocks: list[int]) -> Tensor:
    """(..., H, T, 2 D): keys and values concatenated, the newest of the blocks first, each in time order."""
    in_time = torch.cat([cache.keys, cache.values], dim=-1).split(blocks, dim=-2)
    return torch.cat(in_time[::-1], dim=-2)


def _part(x: Tensor, names: list[str]) -> Tensor:
    """The stored part of a large cache, such as `steps_first_last`, `step_last.layer_last`, `t40`.

    Names of steps and layers select on the leading axes, one by one; "first" and "last" remove their axis.
    """
    axis = 0
    for name in names:
        if match := re.fullmatch(r"(?:step|layer)s?_(first_last|first|last)", name):
            if match[1] == "first_last":
                x = x.index_select(axis, torch.tensor([0, x.shape[axis] - 1]))
                axis += 1
            else:
                x = x.select(axis, 0 if match[1] == "first" else -1)
        elif match := re.fullmatch(r"t(\d+)", name):
            x = x[..., : int(match[1]), :]
        else:
            raise ValueError(f"unknown part of a cache: {name!r}")
    return x


CHECKS: dict[str, Check] = {
    "item6a_stepaudio2_encoder": check_encoder,
    "item6b_stepaudio2_dit": check_estimator,
    "item6c_stepaudio2_flow_inference": check_offline_flow,
    "item6d_stepaudio2_flow_streaming": check_streamed_flow,
    "fullsize_stepaudio2_flow": check_full_size_flow,
}
