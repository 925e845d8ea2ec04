"""What is heard of the demo voice: no silence first, no false alarm, and another voice is noticed."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton import Speaker
from cosyvoice_triton.audible import audible_part, leading_silence, window_levels
from cosyvoice_triton.constants import SAMPLE_RATE

from tests.conftest import ROOT

SENTENCES = [
    json.loads(line)["target_text"]
    for line in (ROOT / "tests/assets/everyday_sentences.jsonl").read_text(encoding="utf-8").splitlines()
][:3]


@pytest.fixture(scope="module")
def speaker(demo_voice: Path) -> Iterator[Speaker]:
    with Speaker(demo_voice, device="cpu") as made:
        yield made


def spoken(speaker: Speaker, **options: object) -> list[np.ndarray]:
    def warned(warning: str) -> None:
        raise AssertionError(f"a false alarm: {warning}")

    options = {"on_warning": warned, "seed": 7, **options}
    return [
        np.concatenate(list(speaker.stream(sentence, voice=voice, **options)))
        for sentence in SENTENCES
        for voice in speaker.voices
    ]


def test_answers_begin_with_sound_and_end_soon_after_it(speaker: Speaker) -> None:
    before, after = spoken(speaker, trim_silence="off"), spoken(speaker)
    for whole, wave in zip(before, after, strict=True):
        assert (leading_silence(wave) or 0) <= 0.04
        heard, audible = audible_part(window_levels(whole)), audible_part(window_levels(wave))
        assert heard and audible and wave.size - audible[1] <= 0.15 * SAMPLE_RATE
        assert (audible[1] - audible[0]) == pytest.approx(heard[1] - heard[0], abs=0.06 * SAMPLE_RATE)


def test_a_conversion_has_no_text_that_its_length_could_be_compared_with(speaker: Speaker, demo_voice: Path) -> None:
    warnings: list[str] = []
    converted = speaker.convert(demo_voice / "voices" / "nezumi.wav", voice="kumo", on_warning=warnings.append)
    assert sum(map(len, converted)) > SAMPLE_RATE and not warnings


def test_a_whole_answer_in_another_voice_is_noticed(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    speaker.speak(SENTENCES[0], voice="kumo", on_warning=warnings.append)
    assert not warnings
    other, encoder = speaker._pipeline.voices.get("nezumi"), speaker._pipeline.synthesizer.encoder
    embedding = encoder.embedding

    async def of_other(recording: object) -> np.ndarray:
        return await embedding(other)  # type: ignore[arg-type]  # a registered voice: a recording or a mix

    monkeypatch.setattr(encoder, "embedding", of_other)
    speaker.speak(SENTENCES[0], voice="kumo", seed=3, on_warning=warnings.append)
    assert len(warnings) == 1 and "it is in another voice" in warnings[0]
