"""Checks of signal processing: mel, filter bank, S3 log mel, resampling, cross-fade."""

import re
from collections.abc import Iterator
from typing import Any

from cosyvoice_triton.constants import MEL_BINS, PROMPT_SAMPLE_RATE
from cosyvoice_triton.voice.features import MelConfig, fbank, log_mel, mel_spectrogram, resample
from torch import Tensor

from tests.parity.fixture import Check, Fixture, outputs_of
from tests.parity.reference.vocoder import cross_fade
from tests.parity.tracing import evaluate

MEL_NAMES = {"sampling_rate": "sample_rate", "n_fft": "n_fft", "win_size": "window", "hop_size": "hop"}
MEL_NAMES |= {"num_mels": "bins", "fmin": "min_hz"}
Computed = Iterator[tuple[str, Tensor]]  # (tolerance family, result), in the order of the call's outputs


def _mel(fixture: Fixture, call: dict[str, Any]) -> Computed:
    expression = _found(r"mel_spectrogram\((.+?)\)", call)[1]
    params = call.get("params", {})
    given = {MEL_NAMES[name]: value for name, value in params.items() if name in MEL_NAMES}
    if params:
        given["max_hz"] = params["fmax"] or params["sampling_rate"] / 2
    yield "mel24k", mel_spectrogram(evaluate(fixture, expression), MelConfig(**given))


def _kaldi(fixture: Fixture, call: dict[str, Any]) -> Computed:
    wav = fixture[_input(call)][0]
    bins, rate = _number("num_mel_bins", call, MEL_BINS), _number("sample_frequency", call, PROMPT_SAMPLE_RATE)
    for normalised in (False, True):
        yield "fbank", fbank(wav, bins=bins, rate=rate, mean_normalised=normalised)


def _s3(fixture: Fixture, call: dict[str, Any]) -> Computed:
    yield "s3_log_mel", log_mel(fixture[_input(call)][0])


def _resample_then_mel(fixture: Fixture, call: dict[str, Any]) -> Computed:
    rates = _found(r"Resample\((\d+), (\d+)\)", call)
    wav = resample(fixture[_input(call)], int(rates[1]), int(rates[2]))
    yield "resample", wav
    yield "mel24k", mel_spectrogram(wav)


def _input(call: dict[str, Any]) -> str:
    return _found(r"in/\w+", call)[0]


def _number(name: str, call: dict[str, Any], default: int) -> int:
    match = re.search(rf"\b{name}=(\d+)", call["fn"])
    return int(match[1]) if match else default


def _found(pattern: str, call: dict[str, Any]) -> re.Match[str]:
    match = re.search(pattern, call["fn"])
    if match is None:
        raise ValueError(f"cannot read the call {call['fn']!r}")
    return match


# Check by the beginning of a call's text.
FEATURES = {
    "mel_spectrogram": _mel,
    "torchaudio.compliance.kaldi.fbank": _kaldi,
    "s3tokenizer.log_mel_spectrogram": _s3,
    "torchaudio.transforms.Resample": _resample_then_mel,
}


def check_features(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    for call in fixture.meta["calls"]:
        compute = FEATURES[_found(r"[\w.]+", call)[0]]
        for key, (family, result) in zip(outputs_of(call), compute(fixture, call), strict=True):
            fixture.families[key] = family
            yield key, result


def check_fade(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    for call in fixture.meta["calls"]:
        fade_in, fade_out = (fixture[key] for key in re.findall(r"in/\w+", call["fn"]))
        yield call["output"], cross_fade(fade_out, fade_in, fixture["in/window_f64"])


CHECKS: dict[str, Check] = {
    "item7_features": check_features,
    "item8a_fade_in_out": check_fade,
    "item5a_cosyvoice3_mel": check_features,
}
