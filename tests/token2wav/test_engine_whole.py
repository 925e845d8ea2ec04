"""The engine: whole utterances."""

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES, TOKEN_MEL_RATIO
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.unet_flow import UNetStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise

from tests.parity.reference import dit_flow, window_flow
from tests.support.streams import (
    ids,
    prompt,
    tensors,
)


def test_whole_utterances_are_reproducible_and_as_long_as_their_tokens(dit, unet):
    for engine in (dit, unet):
        audio = engine.whole(prompt(7), ids(7, 21))
        assert len(audio) == 21 * TOKEN_MEL_RATIO * HOP_SAMPLES
        np.testing.assert_array_equal(audio, engine.whole(prompt(7), ids(7, 21)))


@pytest.mark.parametrize("count", [8, 0])
def test_a_whole_utterance_equals_the_output_of_the_networks(dit_network, unet_network, prompts, count):
    voice, tokens = prompt(3, tokens=count), torch.from_numpy(ids(3, 40))[None]
    prompt_tokens, feat, embedding = tensors(voice)
    all_tokens = torch.cat([prompt_tokens, tokens], dim=1)
    noise = flow_noise().read(0, TOKEN_MEL_RATIO * (count + 40)).T[None]
    lengths = torch.tensor([count + 40]), feat, torch.tensor([feat.shape[1]])
    expected = {
        DiTStreaming(dit_network, flow_noise(), prompts, limits=BatchLimits(), steps=4): dit_flow.inference(
            dit_network, all_tokens, *lengths, embedding, noise=noise, steps=4
        )[0, :, feat.shape[1] :],
        UNetStreaming(unet_network, flow_noise(), limits=BatchLimits(), steps=4): window_flow.inference(
            unet_network, tokens, prompt_tokens, feat, embedding, noise=noise, streaming=False, final=True, steps=4
        )[0],
    }
    for flow, mel in expected.items():
        torch.testing.assert_close(*flow.whole([(voice, tokens[0].numpy())]), mel, atol=1e-4, rtol=0)


def test_whole_utterances_of_a_batch_equal_the_same_utterances_alone(dit, unet):
    """Voices and utterances have different lengths, so all but the longest are padded."""
    utterances = [
        (prompt(seed, tokens), ids(seed, length)) for seed, tokens, length in [(7, 12, 21), (8, 0, 40), (9, 20, 3)]
    ]
    for engine in (dit, unet):
        for together, utterance in zip(engine.whole_batch(utterances), utterances, strict=True):
            np.testing.assert_allclose(together, engine.whole(*utterance), atol=1e-3, rtol=0)


def test_an_invalid_utterance_of_a_batch_is_named(dit):
    good = (prompt(7), ids(7, 21))
    for tokens, message in [
        (ids(7, 0), "is empty"),
        (np.array([120]), "speech token 120"),
        (ids(7, 201), "limit is 200"),
    ]:
        with pytest.raises(ValueError, match=message):
            dit.whole_batch([good, (prompt(8), tokens)])


@pytest.mark.parametrize(("speed", "frames"), [(0.5, 84), (1.0, 42), (2.0, 21), (3.0, 14)])
def test_speed_stretches_a_whole_utterance(unet, speed, frames):
    assert len(unet.whole(prompt(7), ids(7, 21), speed)) == frames * HOP_SAMPLES
