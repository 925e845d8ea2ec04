"""Checks of signal processing: mel, filter bank, S3 log mel, resampling, cross-fade."""

from collections.abc import Iterator

from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice.features import MelConfig, fbank, log_mel, mel_spectrogram, resample
from torch import Tensor

from tests.parity.fixture import Check, Fixture
from tests.parity.reference.vocoder import cross_fade


def check_features(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    max_hz = fixture.meta["calls"][0]["params"]["fmax"] or SAMPLE_RATE / 2
    computed: dict[str, dict[str, Tensor]] = {"mel24k": {}}  # by tolerance family, by output
    for samples, name in ((None, "mel24k"), (23_667, "mel24k_short333")):
        wave = fixture["in/wav24k"][:, :samples]
        computed["mel24k"][name] = mel_spectrogram(wave, MelConfig(max_hz=max_hz))
    if "in/wav16k" in fixture:
        wave = fixture["in/wav16k"]
        resampled = resample(wave, PROMPT_SAMPLE_RATE, SAMPLE_RATE)
        computed["mel24k"]["mel_of_resampled"] = mel_spectrogram(resampled)
        computed["resample"] = {"resampled_16k_to_24k": resampled}
        computed["s3_log_mel"] = {"s3_log_mel_128": log_mel(wave[0])}
        normalised = fbank(wave[0], mean_normalised=True)
        computed["fbank"] = {"kaldi_fbank": fbank(wave[0]), "kaldi_fbank_mean_normalised": normalised}
    for family, results in computed.items():
        for name, result in results.items():
            fixture.families[f"out/{name}"] = family
            yield f"out/{name}", result


def check_fade(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    yield "out/faded", cross_fade(fixture["in/fade_out"], fixture["in/fade_in"], fixture["in/window_f64"])


CHECKS: dict[str, Check] = {
    "item7_features": check_features,
    "item8a_fade_in_out": check_fade,
    "item5a_cosyvoice3_mel": check_features,
}
