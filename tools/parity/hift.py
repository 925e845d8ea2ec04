"""Checks of HiFT: f0, source with injected noise, decode, cached source; tiny and full size."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from common.checkpoint import load_strict
from common.hift import HiFTConfig, HiFTGenerator, fuse_weight_norm, split_weight_norm
from tools.parity.fixture import Check, Fixture, outputs_of
from tools.parity.tracing import intermediates


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
    hift = HiFTGenerator(config_of(fixture.weights_meta(weights_file)))
    return load_strict(hift, fuse_weight_norm(fixture.weights(weights_file)), "cpu", torch.float32)


def build_full_size(fixture: Fixture) -> HiFTGenerator:
    """The official sizes, with weights drawn by the fixture's rule."""
    hift = HiFTGenerator()
    shapes = {key: tuple(value.shape) for key, value in split_weight_norm(hift.state_dict()).items()}
    return load_strict(hift, fuse_weight_norm(fixture.generated_weights(shapes)), "cpu", torch.float32)


def _calls(hift: HiFTGenerator, fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    for call in fixture.meta["calls"]:
        text = call.get("fn", outputs_of(call)[0].rpartition("/")[2])
        # "decode(x=40*in/mel, s=10*in/decode_source)": inputs in the order of the arguments, some of them amplified.
        inputs = [float(gain or 1) * fixture[key] for gain, key in re.findall(r"(?:([\d.]+)\*)?(in/\w+)", text)]
        with intermediates(hift, fixture, call["tag"]) as found:
            results = _call(hift, fixture, text, inputs or [fixture["in/mel"]])
        for key in outputs_of(call):
            yield key, results[key.rpartition("/")[2]]
        yield from found.items()


def _call(hift: HiFTGenerator, fixture: Fixture, text: str, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The results of one call by name."""
    mel = inputs[0]
    if text.startswith("f0"):
        return {"f0": hift.f0(mel)}
    if text.startswith("decode"):
        return {"speech": hift.decode(*inputs)}
    if not text.startswith("inference"):
        raise ValueError(f"{fixture.name}: cannot read the call {text!r}")
    B, _, T = mel.shape
    silent = torch.zeros(B, T * hift.config.hop, hift.config.harmonics + 1)
    speech, source = hift(mel, silent if "zero" in text else fixture["in/draw1_randn"], *inputs[1:])
    return {"speech": speech, "source": source}


def check_tiny(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    hift = build(fixture)
    yield from _calls(hift, fixture)
    for key in fixture.keys:
        if key.startswith("mid/sine_waves_first_"):
            yield (
                key,
                hift.m_source.sines(hift.f0(fixture["in/mel"]), fixture["in/draw1_randn"])[:, : fixture[key].shape[1]],
            )


def check_full_size(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    yield from _calls(build_full_size(fixture), fixture)


CHECKS: dict[str, Check] = {"item5_hift": check_tiny, "fullsize_hift": check_full_size}
