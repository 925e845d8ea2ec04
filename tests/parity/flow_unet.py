"""Fixtures of CosyVoice2's flow: encoder, UNet estimator, flow-matching solve, and the whole flow."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from cosyvoice_triton.checkpoint import load_strict, shapes_of
from cosyvoice_triton.constants import TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.base import FlowMatching, time_schedule
from cosyvoice_triton.networks.flow.config import UNetFlowConfig
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from torch import Tensor, nn

from tests.parity.fixture import Check, Fixture, outputs_of
from tests.parity.reference import window_flow as reference
from tests.parity.reference.encoder import encode_whole
from tests.parity.served import ServedFlow, prompt_of
from tests.parity.tracing import intermediates

Results = Iterator[tuple[str, Tensor]]


def build(fixture: Fixture, file: str | None = None) -> UNetFlow:
    """The flow in a weights file of the fixture; what no tensor shows is from the JSON next to it."""
    state, config = fixture.weights(file), fixture.weights_meta(file)["config"]
    sizes, estimator = UNetFlowConfig.from_shapes(shapes_of(state)), config["estimator"]
    sizes = replace(
        sizes,
        encoder=replace(sizes.encoder, chunk_tokens=config["encoder"]["static_chunk_size"]),
        estimator=replace(
            sizes.estimator,
            heads=estimator["num_heads"],
            head_dim=estimator["attention_head_dim"],
            chunk_frames=estimator["static_chunk_size"],
        ),
    )
    return load_strict(UNetFlow(sizes), state, "cpu", torch.float32)


def check_encoder(fixture: Fixture) -> Results:
    encoder = build(fixture).encoder
    for call in fixture.meta["calls"]:
        xs, context = fixture[call["xs"]], None
        if call["context"]:
            frames = encoder.config.lookahead
            xs, context = xs[:, :-frames], xs[:, -frames:]
        with intermediates(encoder, fixture, call["tag"]) as found:
            ys, valid = encode_whole(encoder, xs, fixture[call["xs_lens"]], context, call["streaming"])
        yield from zip(call["outputs"], (ys, valid.to(torch.uint8)), strict=True)
        # The embedding of each token followed by those ahead of it: (B, T, 1 + lookahead, C) -> (B, T, C)
        yield from ((key, x[:, :, 0] if key.endswith("/embed") else x) for key, x in found.items())


def estimator_calls(fixture: Fixture, estimator: nn.Module, calls: Iterable[dict[str, Any]] | None = None) -> Results:
    """calls: not all of the fixture. Those with "lengths" store the valid frames of each row."""
    for call in calls or fixture.meta["calls"]:
        x, mask, mu, t, speaker, condition = (fixture[key] for key in call["args"])
        streaming = [call["streaming"]] if "streaming" in call else []
        with intermediates(estimator, fixture, call["tag"]) as found:
            y = estimator(x, t, mu, speaker, condition, mask.bool(), *streaming)
        lengths = call.get("lengths", [])
        rows = [row[:, :length] for row, length in zip(y, lengths, strict=True)] if lengths else [y]
        yield from zip(outputs_of(call), rows, strict=True)
        yield from found.items()


def solve_calls(fixture: Fixture, decoder: FlowMatching) -> Results:
    for call in fixture.meta["calls"]:
        mu, mask, speaker, condition = (fixture[key] for key in call["inputs"])
        states: list[Tensor] = []
        velocities: list[Tensor] = []

        def velocity(_: int, x: Tensor, *rows: Tensor, mask=mask, call=call, states=states, velocities=velocities):
            states.append(x[0])
            velocities.append(decoder.estimator(x, *rows, mask.bool().repeat(2, 1, 1), call["streaming"]))
            return velocities[-1]

        steps, noise = call["n_timesteps"], fixture["in/rand_noise"][:, :, : mu.shape[2]] * call["temperature"]
        yield call["output"], decoder.solve(velocity, noise, mu, speaker, condition, steps)
        computed = {
            "t_per_step": torch.tensor(time_schedule(steps)[0]),
            "x_per_step": torch.stack(states),
            "dphi_per_step": torch.stack(velocities),
        }
        for name, tensor in computed.items():
            if (key := f"mid/{call['tag']}/{name}") in fixture:
                yield key, tensor


def flow_calls(fixture: Fixture, network: UNetFlow | CosyVoice3Flow) -> Results:
    """A prefix of a stream as one chunk, or a whole utterance, by the engine; a prefix under full attention, or
    a prompt whose mel is not two frames per token, which serving never computes, by `reference`."""
    noise = fixture["in/rand_noise"]
    served: ServedFlow | None = None
    if "mid/spk" in fixture:
        yield "mid/spk", network.project_speaker(fixture["in/embedding"])
    for call in fixture.meta["calls"]:
        token, prompt_token, prompt_feat = _tokens(fixture, call)
        streaming, final = call["streaming"], call["finalize"]
        whole_tokens = prompt_feat.shape[1] == TOKEN_MEL_RATIO * prompt_token.shape[1]
        if not (streaming or final) or not whole_tokens:
            fixture.computed_by = "reference"
            inputs = network, token, prompt_token, prompt_feat, fixture["in/embedding"]
            flags = {"streaming": streaming, "final": final}
            yield call["output"], reference.inference(*inputs, noise=noise, **flags)
            mu = reference.encode(network, torch.cat([prompt_token, token], dim=1), **flags).transpose(1, 2)
        else:
            served = served or ServedFlow(fixture, network, noise)
            fixture.computed_by = served.computed_by
            prompt = prompt_of(prompt_token[0], prompt_feat[0], fixture["in/embedding"][0])
            if streaming:
                stream = served.open(prompt)
                mel = served.chunk(stream, token[0], final=final)
                served.flow.close(stream)
            else:
                mel = served.whole(prompt, token[0])
            yield call["output"], mel[None]
            mu = served.mu
        if (key := f"mid/{call['tag']}/mu") in fixture:
            yield key, mu


def _tokens(fixture: Fixture, call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Target tokens, prompt tokens and prompt mel of a call; some calls have no prompt."""
    prompt_token, prompt_feat = fixture["in/prompt_token"], fixture["in/prompt_feat"]
    if call["tag"] == "no_prompt":
        prompt_token, prompt_feat = prompt_token[:, :0], prompt_feat[:, :0]
    prompt_feat = prompt_feat[:, : call.get("prompt_feat_frames")]
    token = fixture[call.get("token", "in/token")].clamp(min=0)  # upstream takes ids below 0 as 0; serving refuses them
    return token[:, : call["n_token"]], prompt_token, prompt_feat


CHECKS: dict[str, Check] = {
    "item1_cosyvoice2_encoder": check_encoder,
    "item2_cosyvoice2_unet_estimator": lambda fixture: estimator_calls(fixture, build(fixture).decoder.estimator),
    "item3_cosyvoice2_cfm_solve": lambda fixture: solve_calls(fixture, build(fixture).decoder),
    "item4_cosyvoice2_flow_inference": lambda fixture: flow_calls(fixture, build(fixture)),
    "fullsize_cosyvoice2_flow": lambda fixture: flow_calls(
        fixture, fixture.full_size(lambda: UNetFlow(UNetFlowConfig()))
    ),
}
