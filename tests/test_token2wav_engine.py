"""The engine on the small golden networks: upstream's streaming loops, isolation, limits. Weights are the fixtures'."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.constants import DIT_TAIL_FRAMES, HOP_SAMPLES, LOOKAHEAD_TOKENS, OVERLAP_FRAMES, TOKEN_MEL_RATIO
from common.overlap import hamming_window
from common.prompt import Prompt
from common.token2wav.engine import Token2Wav
from common.token2wav.flows import Chunk, DiTStreaming, UNetStreaming, Voice, VoiceCache
from common.token2wav.noise import NoiseTape, flow_noise, source_noise
from common.token2wav.vocoder import StreamingVocoder
from scripts.parity import flow_dit, flow_unet, hift, streaming
from scripts.parity.fixture import Fixture
from scripts.parity.runner import run_fixture

GOLDEN = Path(__file__).parent / "assets" / "golden"
DIT = "item8b_dit_streaming_token2wav"
UNET = "item8c_cosyvoice2_streaming_token2wav"
VOICES_BYTES = 64 << 20


def prompt(seed: int, tokens: int = 12) -> Prompt:
    rng = np.random.default_rng(seed)
    return Prompt(
        tokens=rng.integers(0, 120, tokens),
        mel=rng.standard_normal((TOKEN_MEL_RATIO * tokens, 80)).astype(np.float32) - 4,
        embedding=rng.standard_normal(24).astype(np.float32),
        text="",
    )


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 120, count)


@pytest.fixture(scope="module")
def vocoder():
    network = hift.build(Fixture(GOLDEN / f"{DIT}.json"), "hift_tiny.weights.safetensors")
    return StreamingVocoder(network, source_noise(network.config.harmonics + 1), hamming_window())


@pytest.fixture(scope="module")
def dit_network():
    return flow_dit.build(Fixture(GOLDEN / f"{DIT}.json"), "stepaudio2_flow_tiny.weights.safetensors")


@pytest.fixture(scope="module")
def unet_network():
    return flow_unet.build(Fixture(GOLDEN / f"{UNET}.json"), "cosyvoice2_flow_tiny.weights.safetensors")


@pytest.fixture
def voices():
    return VoiceCache(VOICES_BYTES)


@pytest.fixture
def dit(dit_network, vocoder, voices):
    return Token2Wav(DiTStreaming(dit_network, flow_noise(), voices, steps=4, max_tokens=200), vocoder)


@pytest.fixture
def unet(unet_network, vocoder):
    return Token2Wav(UNetStreaming(unet_network, flow_noise(), steps=4, max_tokens=200), vocoder)


def dit_chunks(tokens: np.ndarray, hops: list[int]) -> list[Chunk]:
    """New tokens and look-ahead, chunk by chunk; the last takes what is left."""
    chunks, at = [], 0
    for hop in hops:
        chunks.append(Chunk(tokens[at : at + hop + LOOKAHEAD_TOKENS], last=False, offset=at))
        at += hop
    return [*chunks, Chunk(tokens[at:], last=True, offset=at)]


def unet_chunks(tokens: np.ndarray, hops: list[int]) -> list[Chunk]:
    """All tokens so far, chunk by chunk."""
    return [
        Chunk(tokens if chunk.last else tokens[: chunk.offset + len(chunk.tokens)], chunk.last, chunk.offset)
        for chunk in dit_chunks(tokens, hops)
    ]


def speak(engine: Token2Wav, voice: Prompt, chunks: list[Chunk]) -> np.ndarray:
    stream = engine.open(voice)
    return np.concatenate([engine.step(stream, chunk) for chunk in chunks])


@pytest.mark.parametrize("name", [DIT, UNET])
def test_the_loop_matches_upstreams_where_it_is_right(name):
    results = list(run_fixture(Fixture(GOLDEN / f"{name}.json"), streaming.CHECKS[name]))
    assert len(results) >= 4
    assert [result for result in results if result.verdict != "PASS"] == []


@pytest.mark.parametrize("hops", [[], [5], [15, 20], [1, 1, 2, 3], [3, 40]])
@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_every_cut_of_an_utterance_gives_all_of_its_audio(kind, hops, request):
    engine = request.getfixturevalue(kind)
    tokens = ids(1, 47)
    chunks = (dit_chunks if kind == "dit" else unet_chunks)(tokens, hops)
    audio = speak(engine, prompt(1), chunks)
    assert audio.dtype == np.float32
    assert len(audio) == len(tokens) * TOKEN_MEL_RATIO * HOP_SAMPLES
    assert np.isfinite(audio).all() and audio.std() > 1e-4


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_interleaved_streams_equal_the_same_streams_alone(kind, request):
    engine = request.getfixturevalue(kind)
    cut = dit_chunks if kind == "dit" else unet_chunks
    plans = {seed: (prompt(seed), cut(ids(seed, 40), [10, 10 + seed])) for seed in range(4)}
    alone = {seed: speak(engine, *plan) for seed, plan in plans.items()}
    streams = {seed: engine.open(voice) for seed, (voice, _) in plans.items()}
    parts: dict[int, list[np.ndarray]] = {seed: [] for seed in plans}
    for turn in range(3):
        for seed, (_, chunks) in plans.items():
            parts[seed].append(engine.step(streams[seed], chunks[turn]))
    for seed in plans:
        np.testing.assert_array_equal(np.concatenate(parts[seed]), alone[seed])
    assert np.abs(alone[0][: len(alone[1])] - alone[1][: len(alone[0])]).max() > 1e-3


def test_unet_chunks_on_training_boundaries_equal_the_utterance_at_once(unet_network):
    """Boundaries count from the prompt's start: here every 5 tokens, the small network's chunk."""
    flow = UNetStreaming(unet_network, flow_noise(), steps=4)
    voice, tokens = _voice(prompt(3, tokens=8)), ids(3, 40)

    def mel(chunks):
        state = flow.open(voice)
        return torch.cat([flow.step(state, chunk) for chunk in chunks], dim=1)

    whole = mel([Chunk(tokens, last=True)])
    torch.testing.assert_close(mel(unet_chunks(tokens, [12, 5, 10])), whole, atol=1e-4, rtol=0)
    assert (mel(unet_chunks(tokens, [11, 5, 10])) - whole).abs().max() > 1e-2


def test_the_dit_keeps_the_whole_prompt_and_its_recent_frames(dit_network, voices):
    flow = DiTStreaming(dit_network, flow_noise(), voices, steps=2)
    voice = _voice(prompt(4))
    state = flow.open(voice)
    prompt_keys = state.cache.estimator.attention.keys.clone()
    for chunk in dit_chunks(ids(4, 160), [50, 50]):
        flow.step(state, chunk)
    keys = state.cache.estimator.attention.keys
    frames = voice.mel.shape[1]
    assert keys.shape[-2] == frames + DIT_TAIL_FRAMES
    torch.testing.assert_close(keys[..., :frames, :], prompt_keys)
    assert state.cache.frames == frames + TOKEN_MEL_RATIO * 160


def test_streams_of_one_voice_share_its_prompt_cache(dit, voices):
    first, second = dit.open(prompt(5)), dit.open(prompt(5))
    assert len(voices) == 1
    assert first.flow.cache is second.flow.cache
    before = first.flow.cache.estimator.attention.keys.clone()
    dit.step(first, dit_chunks(ids(5, 20), [10])[0])
    torch.testing.assert_close(second.flow.cache.estimator.attention.keys, before)


def test_the_voice_cache_is_bounded_in_bytes_and_forgets_the_least_recently_used(dit_network, vocoder):
    size = DiTStreaming(dit_network, flow_noise(), VoiceCache(0), steps=4).open(_voice(prompt(0))).cache.nbytes
    voices = VoiceCache(2 * size)
    engine = Token2Wav(DiTStreaming(dit_network, flow_noise(), voices, steps=4), vocoder)
    first = engine.open(prompt(0)).flow.cache
    for seed in (1, 0, 2):
        engine.open(prompt(seed))
        assert voices.nbytes <= 2 * size
    assert engine.open(prompt(0)).flow.cache is first
    assert len(voices) == 2


def test_audio_too_short_for_the_overlap_is_kept_for_the_next_chunk(vocoder):
    mel = torch.randn(80, 30) - 4
    state = vocoder.open()
    assert len(vocoder.step(state, mel[:, : OVERLAP_FRAMES - 2], last=False)) == 0
    rest = vocoder.step(state, mel[:, OVERLAP_FRAMES - 2 :], last=True)
    torch.testing.assert_close(rest, vocoder.whole(mel))


def test_an_empty_last_chunk_lets_go_of_the_withheld_audio(dit):
    stream, tokens = dit.open(prompt(6)), ids(6, 13)
    head = dit.step(stream, Chunk(tokens, last=False))
    tail = dit.step(stream, Chunk(tokens[:0], last=True))
    assert len(head) + len(tail) == 10 * TOKEN_MEL_RATIO * HOP_SAMPLES


def test_whole_utterances_are_reproducible_and_as_long_as_their_tokens(dit, unet):
    for engine in (dit, unet):
        audio = engine.whole(prompt(7), ids(7, 21))
        assert len(audio) == 21 * TOKEN_MEL_RATIO * HOP_SAMPLES
        np.testing.assert_array_equal(audio, engine.whole(prompt(7), ids(7, 21)))


@pytest.mark.parametrize(("speed", "frames"), [(0.5, 84), (1.0, 42), (2.0, 21), (3.0, 14)])
def test_speed_stretches_a_whole_utterance(unet, speed, frames):
    assert len(unet.whole(prompt(7), ids(7, 21), speed)) == frames * HOP_SAMPLES


@pytest.mark.parametrize("kind", ["dit", "unet"])
@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(np.array([0, 1, 2, 120, 4]), last=False), "speech token 120 is outside 0..119"),
        (Chunk(np.array([0, -1, 2, 3, 4]), last=False), "speech token -1 is outside"),
        (Chunk(np.arange(20), last=False, offset=7), "token_offset is 7, but 0 tokens"),
        (Chunk(np.arange(3), last=False), "3 speech tokens add 0 to the 0"),
        (Chunk(np.zeros(201, int), last=True), "201 speech tokens; the limit is 200"),
    ],
)
def test_a_chunk_that_cannot_continue_its_stream_is_named(kind, chunk, message, request):
    engine = request.getfixturevalue(kind)
    stream = engine.open(prompt(8))
    with pytest.raises(ValueError, match=message):
        engine.step(stream, chunk)


def test_warming_up_leaves_the_voice_of_a_stream_alone(dit, unet):
    for engine in (dit, unet):
        cold = engine.whole(prompt(7), ids(7, 21))
        engine.warm_up()
        np.testing.assert_array_equal(engine.whole(prompt(7), ids(7, 21)), cold)


def test_a_prompt_without_look_ahead_is_refused(dit):
    with pytest.raises(ValueError, match="the prompt has 2 speech tokens"):
        dit.open(prompt(9, tokens=2))


def test_a_tape_repeats_itself():
    tape = NoiseTape(torch.arange(5.0)[:, None])
    assert tape.read(3, 9)[:, 0].tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert tape.read(11, 2)[:, 0].tolist() == [1, 2]


def test_the_flow_noise_is_upstreams():
    torch.manual_seed(0)
    expected = torch.randn(1, 80, 15000)
    torch.testing.assert_close(flow_noise().read(0, 15000).T[None], expected, atol=0, rtol=0)


def _voice(p: Prompt) -> Voice:
    return Voice(*(torch.from_numpy(x)[None] for x in (p.tokens, p.mel, p.embedding)))
