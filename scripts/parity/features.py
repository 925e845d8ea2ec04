"""Checks of what surrounds the networks: mel, filter bank, S3 log mel, resampling, cross-fade."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from common.audio import MelConfig, fbank, mel_spectrogram, resample
from common.overlap import FadeWindow, cross_fade
from common.prompt import import_s3tokenizer
from scripts.parity.fixture import Check, Fixture, outputs_of
from scripts.parity.tracing import evaluate

Computed = Iterator[tuple[str, Tensor]]  # (family of the tolerance, result), in the order of the call's outputs


def _mel(fixture: Fixture, call: dict[str, Any]) -> Computed:
    expression = re.search(r"mel_spectrogram\((.+?)\)", call["fn"])[1]
    params = call.get("params")
    config = MelConfig() if params is None else _mel_config(params)
    yield "mel24k", mel_spectrogram(evaluate(fixture, expression), config)


def _mel_config(params: dict[str, Any]) -> MelConfig:
    return MelConfig(
        sample_rate=params["sampling_rate"],
        n_fft=params["n_fft"],
        window=params["win_size"],
        hop=params["hop_size"],
        bins=params["num_mels"],
        min_hz=params["fmin"],
        max_hz=params["fmax"],
    )


def _kaldi(fixture: Fixture, call: dict[str, Any]) -> Computed:
    wav = fixture[_input(call)][0]
    bins, rate = (int(re.search(rf"{name}=(\d+)", call["fn"])[1]) for name in ("num_mel_bins", "sample_frequency"))
    for normalised in (False, True):
        yield "fbank", fbank(wav, bins=bins, rate=rate, mean_normalised=normalised)


def _s3(fixture: Fixture, call: dict[str, Any]) -> Computed:
    bins, padding = (int(re.search(rf"{name}=(\d+)", call["fn"])[1]) for name in ("n_mels", "padding"))
    yield "s3_log_mel", import_s3tokenizer().log_mel_spectrogram(fixture[_input(call)][0], bins, padding)


def _resample_then_mel(fixture: Fixture, call: dict[str, Any]) -> Computed:
    rates = re.search(r"Resample\((\d+), (\d+)\)", call["fn"])
    wav = resample(fixture[_input(call)], int(rates[1]), int(rates[2]))
    yield "resample", wav
    yield "mel24k", mel_spectrogram(wav)


def _input(call: dict[str, Any]) -> str:
    return re.search(r"in/\w+", call["fn"])[0]


# By how the text of a call begins.
FEATURES = {
    "mel_spectrogram": _mel,
    "torchaudio.compliance.kaldi.fbank": _kaldi,
    "s3tokenizer.log_mel_spectrogram": _s3,
    "torchaudio.transforms.Resample": _resample_then_mel,
}


def check_features(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    for call in fixture.meta["calls"]:
        compute = FEATURES[call["fn"].partition("(")[0]]
        for key, (family, result) in zip(outputs_of(call), compute(fixture, call), strict=False):
            fixture.families[key] = family
            yield key, result


def check_fade(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    stored = fixture["in/window_f64"]
    half = stored.shape[0] // 2
    window = FadeWindow(rising=stored[:half], falling=stored[half:])
    for call in fixture.meta["calls"]:
        fade_in, fade_out = (fixture[key] for key in re.findall(r"in/\w+", call["fn"]))
        yield call["output"], cross_fade(fade_out, fade_in, window)


CHECKS: dict[str, Check] = {"item7_features": check_features, "item8a_fade_in_out": check_fade}
