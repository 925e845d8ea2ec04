"""Which part of an answer is heard, how silence at its ends is cut while it comes in chunks, and when it is played."""

import numpy as np
import pytest
from cosyvoice_triton.audible import PLAYER_SECONDS, Playback, SilenceTrimmer, leading_silence
from cosyvoice_triton.constants import SAMPLE_RATE

MS = SAMPLE_RATE // 1000


def sound(ms: int, level: float = 0.3) -> np.ndarray:
    return (level * np.sin(2 * np.pi * 200 * np.arange(ms * MS) / SAMPLE_RATE)).astype(np.float32)


def silence(ms: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 10 ** (-70 / 20), ms * MS).astype(np.float32)


def trimmed(*chunks: np.ndarray) -> list[np.ndarray]:
    trimmer = SilenceTrimmer()
    parts = [trimmer.trimmed(chunk, chunk is chunks[-1]) for chunk in chunks]
    assert trimmer.cut + sum(map(len, parts)) <= sum(map(len, chunks))
    return parts


@pytest.mark.parametrize("level", [0.3, 0.02], ids=["speech", "quiet speech"])
def test_silence_at_both_ends_is_cut_and_pauses_between_stay(level: float) -> None:
    spoken = np.concatenate([sound(300, level), silence(400), sound(300, level)])
    trimmer = SilenceTrimmer()
    audio = trimmer.trimmed(np.concatenate([silence(340), spoken, silence(600)]), True)
    assert 0.02 <= (leading_silence(audio) or 0.0) <= 0.04
    begin = 340 * MS - trimmer.cut
    np.testing.assert_array_equal(audio[begin:][: len(spoken)], spoken)
    assert len(audio) - begin - len(spoken) == pytest.approx(150 * MS, abs=20 * MS)
    assert abs(audio[0]) < 1e-4 and abs(audio[-1]) < 1e-4, "with a fade"


@pytest.mark.parametrize("decibels", [-25, -40])
def test_a_breath_or_soft_consonant_before_a_vowel_is_no_silence(decibels: int) -> None:
    noise = np.random.default_rng(1).normal(0, 0.2 * 10 ** (decibels / 20), 80 * MS).astype(np.float32)
    (audio,) = trimmed(np.concatenate([silence(200), noise, sound(300)]))
    np.testing.assert_array_equal(audio[-380 * MS :][: len(noise)], noise)
    assert len(audio) == pytest.approx(410 * MS, abs=20 * MS)


def test_audio_that_begins_at_once_and_ends_soon_is_not_changed() -> None:
    chunks = [sound(200), sound(300), np.concatenate([sound(100), silence(140)])]
    for part, chunk in zip(trimmed(*chunks), chunks, strict=True):
        np.testing.assert_array_equal(part, chunk)
    (tiny,) = trimmed(np.ones(15, np.float32))
    assert tiny.size == 15


def test_a_silent_first_chunk_is_not_sent_and_an_onset_across_chunks_is_found() -> None:
    whole = np.concatenate([silence(395), sound(500)])
    parts = trimmed(whole[: 300 * MS], whole[300 * MS : 400 * MS], whole[400 * MS :])
    assert not parts[0].size
    whole[50 * MS : 50 * MS + 24] = 0.5  # a click is no onset
    assert leading_silence(whole) == pytest.approx(0.385, abs=0.01)
    audio = np.concatenate(parts)
    assert 0.02 <= (leading_silence(audio) or 0.0) <= 0.04
    np.testing.assert_array_equal(audio[-480 * MS :], whole[-480 * MS :])


def test_silence_that_was_sent_counts_at_the_end_and_an_answer_that_is_never_heard_is_short_and_not_empty() -> None:
    parts = trimmed(np.concatenate([sound(300), silence(130)]), silence(200))
    assert [len(part) / MS for part in parts] == [430, pytest.approx(20, abs=30)]
    assert len(trimmed(sound(300), silence(400))[1]) == 150 * MS
    first, last = trimmed(silence(400), silence(400))
    assert not first.size and 0 < last.size <= 150 * MS


def test_audio_is_played_from_its_arrival_on() -> None:
    playback = Playback()
    assert playback.left(5.0) is None
    assert playback.add(2.0, 10.0) == 0.0
    assert playback.left(10.5) == pytest.approx(1.5) and playback.left(13.0) == pytest.approx(-1.0)
    assert Playback(0.5, 10.0).left(10.2) == pytest.approx(0.3), "a later segment begins with what is left"


@pytest.mark.parametrize("late", [-0.01, 1.5])
def test_the_players_buffer_hides_a_late_chunk_and_a_gap_puts_off_what_is_played_after_it(late: float) -> None:
    playback, arrival = Playback(), 1.0 + PLAYER_SECONDS + late
    playback.add(1.0, 0.0)
    assert playback.add(1.0, arrival) == pytest.approx(max(0.0, late))
    assert playback.left(arrival) == pytest.approx(2.0 + max(0.0, late) - arrival)
