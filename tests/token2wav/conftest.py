"""The small networks that upstream's outputs were recorded with; the service with a fake engine."""

import pytest
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import CosyVoice3Streaming
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches
from cosyvoice_triton.token2wav.flow.unet_flow import UNetStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise, source_noise, uniform_noise
from cosyvoice_triton.token2wav.vocoder.causal_hift_vocoder import CausalVocoder
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder

from tests.parity import cosyvoice3 as cosyvoice3_parity
from tests.parity import flow_dit, flow_unet, hift
from tests.parity.fixture import Fixture
from tests.support.fake_engine import Client, FakeEngine, queue_behind_a_running_chunk, started
from tests.support.streams import COSYVOICE3, DIT, GOLDEN, GOLDEN3, UNET, VOICES_BYTES
from tests.support.waiting import Clock

FLOWS = {"dit": DiTStreaming, "unet": UNetStreaming, "cosyvoice3": CosyVoice3Streaming}


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


@pytest.fixture(scope="module")
def cosyvoice3_network():
    return cosyvoice3_parity.build(Fixture(GOLDEN3 / f"{COSYVOICE3}.json"), "cosyvoice3_flow_tiny.weights.safetensors")


@pytest.fixture(scope="module")
def causal_vocoder():
    fixture = Fixture(GOLDEN3 / f"{COSYVOICE3}.json")
    network = cosyvoice3_parity.tiny_vocoder(fixture, "cosyvoice3_hift_tiny.weights.safetensors")
    return CausalVocoder(network, uniform_noise(network.config.harmonics + 1), limits=BatchLimits(max_streams=99))


@pytest.fixture
def prompts():
    return PromptCaches(VOICES_BYTES)


@pytest.fixture(scope="module")
def flow_of(request):
    """Makes the flow of a name, of its small network or another one, with room for voices or `prompts`."""

    def make(name, *, kind=None, network=None, prompts=None, streams=8, **options):
        network = network or request.getfixturevalue(f"{name}_network")
        caches = () if name == "unet" else (PromptCaches(VOICES_BYTES) if prompts is None else prompts,)
        options = {"limits": BatchLimits(max_streams=streams), "steps": 4} | options
        return (kind or FLOWS[name])(network, flow_noise(), *caches, **options)

    return make


@pytest.fixture
def dit(flow_of, vocoder, prompts):
    return Token2Wav(flow_of("dit", prompts=prompts, max_tokens=200), vocoder)


@pytest.fixture
def unet(flow_of, vocoder):
    return Token2Wav(flow_of("unet", max_tokens=200), vocoder)


@pytest.fixture
def cosyvoice3(flow_of, causal_vocoder, prompts):
    flow = flow_of("cosyvoice3", prompts=prompts, steps=2, max_tokens=200, cache_frames=1000)
    return Token2Wav(flow, causal_vocoder)


@pytest.fixture
def engine():
    return FakeEngine()


def ended(service, engine):
    engine.gate.set()
    service.close()
    assert engine.live == 0 and engine.broken == []


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def service(engine, clock):
    service = started(engine, clock)
    yield service
    ended(service, engine)


@pytest.fixture
def client(service):
    return Client(service)


@pytest.fixture
def full(engine, clock):
    """A client of a service that is rendering, with four streams, all that it admits. Stream 5 has been heard."""
    service = started(engine, clock)
    client = Client(service)
    client.heard(5)
    queue_behind_a_running_chunk(client, engine, {1: [1], 2: [2], 3: [3]})
    yield client
    ended(service, engine)
