"""The small networks that upstream's outputs were recorded with."""

import pytest

from common.token2wav.hift.streaming import StreamingVocoder
from common.token2wav.limits import BatchLimits
from common.token2wav.noise import source_noise
from tests.support.streams import DIT, GOLDEN, UNET
from tools.parity import flow_dit, flow_unet, hift
from tools.parity.fixture import Fixture


@pytest.fixture(scope="module")
def vocoder():
    network = hift.build(Fixture(GOLDEN / f"{DIT}.json"), "hift_tiny.weights.safetensors")
    return StreamingVocoder(network, source_noise(network.config.harmonics + 1), limits=BatchLimits(max_streams=99))


@pytest.fixture(scope="module")
def dit_network():
    return flow_dit.build(Fixture(GOLDEN / f"{DIT}.json"), "stepaudio2_flow_tiny.weights.safetensors")


@pytest.fixture(scope="module")
def unet_network():
    return flow_unet.build(Fixture(GOLDEN / f"{UNET}.json"), "cosyvoice2_flow_tiny.weights.safetensors")
