"""Checks of HiFT: f0, source with injected noise, decode, cached source; tiny and full size."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from common.hift import HiFTConfig, HiFTGenerator, fuse_weight_norm, split_weight_norm
from scripts.parity.fixture import Check, Fixture


def config_of(meta: dict) -> HiFTConfig:
    """Sizes from a weights file's JSON."""
    hift, f0 = meta["config"]["hift"], meta["config"]["f0_predictor"]
    return HiFTConfig(
        mel_bins=hift["in_channels"],
        channels=hift["base_channels"],
        f0_channels=f0["cond_channels"],
        harmonics=hift["nb_harmonics"],
        upsample_kernels=tuple(hift["upsample_kernel_sizes"]),
        resblock_kernels=tuple(hift["resblock_kernel_sizes"]),
        source_resblock_kernels=tuple(hift["source_resblock_kernel_sizes"]),
        n_fft=hift["istft_params"]["n_fft"],
        sample_rate=hift["sampling_rate"],
        upsample_rates=tuple(hift["upsample_rates"]),
        istft_hop=hift["istft_params"]["hop_len"],
        resblock_dilations=tuple(map(tuple, hift["resblock_dilation_sizes"])),
        source_resblock_dilations=tuple(map(tuple, hift["source_resblock_dilation_sizes"])),
        sine_amplitude=hift["nsf_alpha"],
        noise_deviation=hift["nsf_sigma"],
        voiced_threshold=hift["nsf_voiced_threshold"],
        leaky_slope=hift["lrelu_slope"],
        audio_limit=hift["audio_limit"],
    )


def build(fixture: Fixture, weights_file: str | None = None) -> HiFTGenerator:
    """The network that a fixture's weights file describes."""
    hift = HiFTGenerator(config_of(fixture.weights_meta(weights_file))).eval()
    hift.load_state_dict(fuse_weight_norm(fixture.weights(weights_file)))
    return hift


def build_full_size(fixture: Fixture) -> HiFTGenerator:
    """The official sizes, with weights drawn by the fixture's rule."""
    hift = HiFTGenerator().eval()
    shapes = {key: tuple(value.shape) for key, value in split_weight_norm(hift.state_dict()).items()}
    hift.load_state_dict(fuse_weight_norm(fixture.generated_weights(shapes)))
    return hift


def _no_noise(hift: HiFTGenerator, mel: Tensor) -> Tensor:
    B, _, T = mel.shape
    return torch.zeros(B, T * hift.config.hop, hift.config.harmonics + 1)


def _common(hift: HiFTGenerator, fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    mel = fixture["in/mel"]
    yield "out/f0", hift.f0(mel)
    yield "out/decode/speech", hift.decode(mel, fixture["in/decode_source"])
    speech, source = hift(mel, _no_noise(hift, mel))
    yield "out/zero_noise/speech", speech
    yield "out/zero_noise/source", source


def check_tiny(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    hift = build(fixture)
    mel, noise = fixture["in/mel"], fixture["in/draw1_randn"]
    yield from _common(hift, fixture)
    for prefix, cached in (("out/", None), ("out/cached/", fixture["in/cache_source"])):
        speech, source = hift(mel, noise, cached)
        yield f"{prefix}speech", speech
        yield f"{prefix}source", source
    # Loud enough to reach the limiter: "decode(x=40*in/mel, s=10*in/decode_source)".
    mel_gain, source_gain = map(float, re.findall(r"=([\d.]+)\*", fixture.call("decode_loud")["fn"]))
    yield "out/decode_loud/speech", hift.decode(mel_gain * mel, source_gain * fixture["in/decode_source"])
    for key in fixture.keys:
        if key.startswith("mid/sine_waves_first_"):
            yield key, hift.m_source.sines(hift.f0(mel), noise)[:, : fixture[key].shape[1]]


def check_full_size(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    yield from _common(build_full_size(fixture), fixture)


CHECKS: dict[str, Check] = {"item5_hift": check_tiny, "fullsize_hift": check_full_size}
