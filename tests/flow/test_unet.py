from pathlib import Path

import pytest
import torch

from tests.parity import flow_unet
from tests.parity.fixture import Fixture
from tests.parity.reference.window_flow import inference

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"
MEL = 80


@pytest.fixture(scope="module")
def flow():
    return flow_unet.build(Fixture(GOLDEN / "item4_cosyvoice2_flow_inference.json"))


@pytest.fixture
def inputs(flow):
    """Two streams of 8 prompt and 27 target tokens, chunks of 5 tokens."""
    random = torch.Generator().manual_seed(5)
    return {
        "token": torch.randint(flow.config.vocab, (2, 27), generator=random),
        "prompt_token": torch.randint(flow.config.vocab, (2, 8), generator=random),
        "prompt_feat": torch.randn(2, 16, MEL, generator=random),
        "embedding": torch.randn(2, flow.config.speaker_dim, generator=random),
        "noise": torch.randn(1, MEL, 70, generator=random),
    }


@pytest.mark.parametrize("rendered", [2, 12, 22])  # with the 8 tokens of the prompt: ends of 5-token chunks
def test_a_prefix_that_ends_on_a_chunk_equals_the_finished_stream(flow, inputs, rendered):
    whole = inference(flow, **inputs, streaming=True, final=True)
    part = inputs | {"token": inputs["token"][:, : rendered + 3]}
    mel = inference(flow, **part, streaming=True, final=False)
    assert mel.shape == (2, MEL, 2 * rendered)
    torch.testing.assert_close(mel, whole[:, :, : mel.shape[2]], atol=1e-5, rtol=0)


def test_a_prefix_that_ends_within_a_chunk_differs_only_in_that_chunk(flow, inputs):
    whole = inference(flow, **inputs, streaming=True, final=True)
    part = inputs | {"token": inputs["token"][:, :17]}  # 8 + 17 - 3 tokens: two after the last whole chunk
    mel = inference(flow, **part, streaming=True, final=False)
    difference = (mel - whole[:, :, :28]).abs().amax(dim=(0, 1))
    assert difference[:24].max() < 1e-5
    assert difference[24:].max() > 1e-3


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_a_stream_is_the_same_alone_and_in_a_batch(flow, inputs, streaming, final):
    batch = inference(flow, **inputs, streaming=streaming, final=final)
    for row in range(2):
        alone = {name: tensor if name == "noise" else tensor[row : row + 1] for name, tensor in inputs.items()}
        mel = inference(flow, **alone, streaming=streaming, final=final)
        torch.testing.assert_close(mel, batch[row : row + 1], atol=1e-5, rtol=0)


def test_the_number_of_euler_steps_is_a_setting(flow, inputs):
    few = inference(flow, **inputs, streaming=False, final=True, steps=4)
    many = inference(flow, **inputs, streaming=False, final=True)
    assert few.shape == many.shape
    assert 1e-4 < (few - many).abs().mean() < 0.5
