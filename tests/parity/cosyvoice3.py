"""Fixtures of CosyVoice3: flow, vocoder, noise tables, silent tokens, and the streaming loops of upstream's callers."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from cosyvoice_triton.checkpoint import load_strict, shapes_of
from cosyvoice_triton.constants import MAX_STREAM_TOKENS, SAMPLE_RATE, TOKEN_MEL_RATIO, TOKEN_RATE
from cosyvoice_triton.networks.flow.checkpoint import without_rotary
from cosyvoice_triton.networks.flow.config import CosyVoice3FlowConfig
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.hift import CausalHiFTGenerator, HiFTConfig, build_causal_hift, fuse_weight_norm
from cosyvoice_triton.networks.hift.causal import F0_LOOKAHEAD, PRE_LOOKAHEAD, Contexts
from cosyvoice_triton.networks.hift.generator import stft
from cosyvoice_triton.orchestrator.token_buffer import MAX_SILENT_TOKENS, SilenceFilter
from cosyvoice_triton.token2wav.gpu.noise import (
    FLOW_NOISE_FRAMES,
    NoiseTape,
    flow_noise,
    table_generator,
    uniform_noise,
)
from cosyvoice_triton.token2wav.vocoder.causal_hift_vocoder import CausalVocoder
from torch import Tensor

from tests.parity.fixture import Check, Fixture
from tests.parity.flow_unet import estimator_calls, flow_calls, solve_calls
from tests.parity.hift import official_state, vocoder_calls
from tests.parity.reference import window_flow as reference
from tests.parity.served import LIMITS, ServedFlow, prompt_of
from tests.support.streams import vocoded

Results = Iterator[tuple[str, Tensor]]
TABLE_SECONDS = 300  # of upstream's noise tables


def build(fixture: Fixture, file: str | None = None) -> CosyVoice3Flow:
    """The flow in a weights file of the fixture."""
    state = fixture.weights(file)
    network = CosyVoice3Flow(CosyVoice3FlowConfig.from_shapes(shapes_of(state)))
    return load_strict(network, without_rotary(state), "cpu", torch.float32)


def check_lookahead(fixture: Fixture) -> Results:
    flow = build(fixture)
    ahead = flow.config.encoder.lookahead
    for call in fixture.meta["calls"]:
        padded = F.pad(fixture[call["xs"]], (0, 0, 0, 0 if call["context"] else ahead))
        windows = padded.unfold(1, ahead + 1, 1).transpose(2, 3)  # (B, T, C, 1 + lookahead) -> (B, T, 1 + lookahead, C)
        yield call["output"], flow.pre_lookahead_layer(windows)


class _WholeVocoder:
    """The causal vocoder's network over whole recordings, with the noise of a fixture."""

    def __init__(self, fixture: Fixture, hift: CausalHiFTGenerator) -> None:
        self._fixture, self.hift = fixture, hift
        self._tape = NoiseTape(fixture["in/noise_table"])

    def noise(self, samples: int) -> Tensor:
        return self._tape.read(0, samples)[None]

    def f0(self, mel: Tensor, final: bool) -> Tensor:
        mel = F.pad(mel, (0, F0_LOOKAHEAD if final else 0))
        frames = torch.tensor([mel.shape[2] - F0_LOOKAHEAD])
        return self.hift.f0_predictor(mel, frames, Contexts(None)).float()

    def source(self, mel: Tensor, final: bool, gain: float) -> Tensor:
        f0 = self.f0(mel, final)
        source, _ = self.hift.m_source(f0, gain * self.noise(f0.shape[1] * self.hift.config.hop))
        return source

    def decode(self, mel: Tensor, source: Tensor, final: bool) -> Tensor:
        mel = F.pad(mel, (0, PRE_LOOKAHEAD)) if final else mel
        frames = mel.shape[2] - PRE_LOOKAHEAD
        contexts, ends = Contexts(None), torch.tensor([final])
        speech = self.hift.decode(mel, source, torch.tensor([frames]), ends, contexts, begins=True)
        return self._given(speech, frames, final)

    def inference(self, mel: Tensor, final: bool, gain: float) -> Tensor:
        frames, ends = torch.tensor([mel.shape[2]]), torch.tensor([final])
        speech, _ = self.hift(mel, lambda samples: gain * self.noise(samples), frames, ends, ending=final)
        return self._given(speech, self.hift.vocoded(mel.shape[2], begins=True, ends=final), final)

    def _given(self, speech: Tensor, frames: int, final: bool) -> Tensor:
        """Upstream withholds the last frame of a prefix, ours only the samples of it that the next one changes."""
        return speech[:, : self.hift.config.hop * (frames if final else frames - 1)]

    def calls(self) -> Results:
        return vocoder_calls(self._fixture, self.hift, self._call)

    def _call(self, text: str, inputs: list[Tensor]) -> dict[str, Tensor]:
        final, gain = "finalize=False" not in text, 0.0 if "noise table all zero" in text else 1.0
        if text.startswith("f0_predictor"):
            return {"f0": self.f0(inputs[0], final)}
        if text.startswith("decode"):
            return {"speech": self.decode(inputs[0], inputs[1], final)}
        if not text.startswith("inference"):
            raise ValueError(f"{self._fixture.name}: cannot read the call {text!r}")
        return {"speech": self.inference(inputs[0], final, gain), "source": self.source(inputs[0], final, gain)}


def tiny_vocoder(fixture: Fixture, file: str | None = None) -> CausalHiFTGenerator:
    state = fuse_weight_norm(fixture.weights(file))
    return build_causal_hift(HiFTConfig.from_shapes(shapes_of(state)), state)


def check_vocoder(fixture: Fixture) -> Results:
    vocoder = _WholeVocoder(fixture, tiny_vocoder(fixture))
    yield from vocoder.calls()
    hift, mel = vocoder.hift, fixture["in/mel"]
    waves, _ = hift.m_source.sines(vocoder.f0(mel, True), vocoder.noise(mel.shape[2] * hift.config.hop))
    yield from ((key, waves[:, : fixture[key].shape[1]]) for key in fixture.keys if key.startswith("mid/sine_waves_"))
    for key in fixture.keys:
        if key.startswith("mid/decode/s_stft"):
            columns = stft(fixture["in/decode_source"][:, 0], hift.stft_window, hift.config.istft_hop)
            yield key, columns[..., : fixture[key].shape[2]]


def check_full_size_vocoder(fixture: Fixture) -> Results:
    built = build_causal_hift(HiFTConfig(), official_state(fixture, CausalHiFTGenerator(HiFTConfig())))
    yield from _WholeVocoder(fixture, built).calls()


def check_tables(fixture: Fixture) -> Results:
    """The flow's noise and the vocoder's are those that serving reads; the rest, which it does not need, shows that
    they are drawn in upstream's order."""
    components, generator = fixture["out/rand_ini"].shape[1], table_generator()
    initial = torch.rand(1, components, generator=generator)
    initial[:, 0] = 0
    table = torch.rand(TABLE_SECONDS * SAMPLE_RATE, components, generator=generator)
    torch.rand(components + 1, generator=generator)  # the source's mixing layer
    yield "out/rand_ini", initial
    yield "out/uv_first_64", torch.rand(64, 1, generator=generator)
    served = uniform_noise(components)
    index = fixture["in/sine_waves_row_index"]
    longest = MAX_STREAM_TOKENS // TOKEN_RATE * SAMPLE_RATE
    yield "out/sine_waves_first_64", served.read(0, 64)
    yield "out/sine_waves_rows", torch.where((index < longest)[:, None], served.at(index), table[index])
    flow = flow_noise().read(0, FLOW_NOISE_FRAMES).T[None]  # (T, C) -> (1, C, T)
    yield "out/rand_noise_first_8_columns", flow[..., :8]
    yield "out/rand_noise_last_8_columns", flow[..., -8:]


def check_silence(fixture: Fixture) -> Results:
    assert fixture.meta["max_silent_tokens"] == MAX_SILENT_TOKENS
    for call in fixture.meta["calls"]:
        kept = SilenceFilter(fixture.meta["silent_tokens"]).kept(fixture[call["tokens"]].tolist())
        yield call["output"], torch.tensor(kept)


def check_streaming(fixture: Fixture) -> Results:
    """Our engine, where it renders a chunk by upstream's rules: under the chunk mask, or the last call under full
    attention as a whole utterance. Earlier calls under full attention are computed by `reference`.

    Our vocoder keeps what upstream's computes again for every chunk, and gives a frame less 8 samples more of it.
    """
    flow_file, hift_file = fixture.meta["weights_files"]
    network, hift = build(fixture, flow_file), tiny_vocoder(fixture, hift_file)
    prompt = prompt_of(fixture["in/prompt_token"][0], fixture["in/prompt_feat"][0], fixture["in/embedding"][0])
    served = ServedFlow(fixture, network, fixture["in/rand_noise"])
    stream, by_engine = served.open(prompt), fixture.computed_by
    full_attention = fixture.name.endswith("full_attention")
    mels: list[Tensor] = []  # that are vocoded
    for call in fixture.meta["calls"]:
        tag, (first, end), offset, final = call["tag"], call["token"], call["token_offset"], call["finalize"]
        tokens = fixture["in/token"][0, first:end]
        fixture.computed_by = by_engine
        if call["stream"] and not full_attention:
            mel = served.chunk(stream, tokens, final=final, offset=offset)
        elif final:
            mel = served.whole(prompt, tokens)[:, TOKEN_MEL_RATIO * offset :]
        else:
            fixture.computed_by = "reference"
            inputs = (fixture[f"in/{name}"] for name in ("prompt_token", "prompt_feat", "embedding"))
            noise = fixture["in/rand_noise"]
            mel = reference.inference(network, tokens[None], *inputs, noise=noise, streaming=False, final=False)
            mel = mel[0, :, TOKEN_MEL_RATIO * offset :]
        # The vocoder sums f0 over the whole stream: what float16 rounds of a mel shifts the phase of all later samples,
        # unheard, and no bound of the difference holds. In float16 it gets the stored mel; the flow's own is compared.
        vocoded_mel = mel if fixture.dtype == torch.float32 else fixture[f"mid/{tag}/mel"][0]
        mels.append(vocoded_mel.to(fixture.device, mel.dtype))
        yield from ((key, mel[None]) for key in (f"mid/{tag}/mel", f"out/{tag}/mel") if key in fixture)
    tape = NoiseTape(fixture["in/noise_table"].to(fixture.device))
    vocoder = CausalVocoder(hift.to(fixture.device).body_to(fixture.dtype), tape, limits=LIMITS)
    (chunks,) = vocoded(vocoder, [torch.cat(mels, dim=1)], [[mel.shape[1] for mel in mels]])
    speech, fixture.computed_by = torch.cat(chunks)[None], by_engine
    for call in fixture.meta["calls"]:
        if (key := f"out/{call['tag']}/speech") in fixture:
            yield key, speech[:, call["speech_offset"] :][:, : call["speech_samples"]]


CHECKS: dict[str, Check] = {
    "item1a_cosyvoice3_pre_lookahead": check_lookahead,
    "item1b_cosyvoice3_dit": lambda fixture: estimator_calls(fixture, build(fixture).decoder.estimator),
    "item2_cosyvoice3_cfm_solve": lambda fixture: solve_calls(fixture, build(fixture).decoder),
    "item3_cosyvoice3_flow_inference": lambda fixture: flow_calls(fixture, build(fixture)),
    "item4_cosyvoice3_hift": check_vocoder,
    "item4b_cosyvoice3_noise_tables": check_tables,
    "item5b_cosyvoice3_silent_tokens": check_silence,
    "item6a_cosyvoice3_streaming_cli": check_streaming,
    "item6b_cosyvoice3_streaming_script": check_streaming,
    "item6c_cosyvoice3_streaming_triton": check_streaming,
    "item6d_cosyvoice3_streaming_triton_full_attention": check_streaming,
    "fullsize_cosyvoice3_flow": lambda fixture: flow_calls(
        fixture, fixture.full_size(lambda: CosyVoice3Flow(CosyVoice3FlowConfig()))
    ),
    "fullsize_cosyvoice3_hift": check_full_size_vocoder,
}
