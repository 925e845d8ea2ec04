"""Checks of what surrounds the networks: mel, filter bank, S3 log mel, resampling, cross-fade."""

import re
from collections.abc import Iterator

from torch import Tensor

from common.audio import fbank, mel_spectrogram, resample
from common.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from common.overlap import FadeWindow, cross_fade
from common.prompt import import_s3tokenizer
from scripts.parity.fixture import Check, Fixture

_CUT = re.compile(r"in/(\w+)\[:, :(\d+)\]")  # in the text of a call on the head of an input


def _mel_input(fixture: Fixture, tag: str) -> Tensor:
    """The wave that a call of mel_spectrogram was given, whole or cut."""
    cut = _CUT.search(fixture.call(tag)["fn"])
    return fixture[f"in/{cut[1]}"][:, : int(cut[2])] if cut else fixture["in/wav24k"]


def check_features(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    for call in fixture.meta["calls"]:
        if call["tag"].startswith("mel24k"):
            fixture.families[call["output"]] = "mel24k"
            yield call["output"], mel_spectrogram(_mel_input(fixture, call["tag"]))
    wav16k = fixture["in/wav16k"]
    for key, normalised in (("out/kaldi_fbank", False), ("out/kaldi_fbank_mean_normalised", True)):
        fixture.families[key] = "fbank"
        yield key, fbank(wav16k[0], mean_normalised=normalised)
    fixture.families["out/s3_log_mel_128"] = "s3_log_mel"
    yield "out/s3_log_mel_128", import_s3tokenizer().log_mel_spectrogram(wav16k[0], n_mels=128)
    wav24k = resample(wav16k, PROMPT_SAMPLE_RATE, SAMPLE_RATE)
    fixture.families["out/resampled_16k_to_24k"] = "resample"
    yield "out/resampled_16k_to_24k", wav24k
    fixture.families["out/mel_of_resampled"] = "mel24k"
    yield "out/mel_of_resampled", mel_spectrogram(wav24k)


def check_fade(fixture: Fixture) -> Iterator[tuple[str, Tensor]]:
    stored = fixture["in/window_f64"]
    half = stored.shape[0] // 2
    window = FadeWindow(rising=stored[:half], falling=stored[half:])
    yield "out/faded", cross_fade(fixture["in/fade_out"], fixture["in/fade_in"], window)


CHECKS: dict[str, Check] = {"item7_features": check_features, "item8a_fade_in_out": check_fade}
