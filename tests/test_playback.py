"""How much audio a listener has left."""

import pytest
from cosyvoice_triton.playback import PLAYER_SECONDS, Playback


def test_audio_is_played_from_its_arrival_on() -> None:
    playback = Playback()
    assert playback.left(5.0) is None
    assert playback.add(2.0, 10.0) == 0.0
    assert playback.left(10.5) == pytest.approx(1.5) and playback.left(13.0) == pytest.approx(-1.0)


def test_the_players_buffer_hides_a_late_chunk() -> None:
    playback = Playback()
    playback.add(1.0, 0.0)
    assert playback.add(1.0, 1.0 + PLAYER_SECONDS - 0.01) == 0.0
    assert playback.left(1.5) == pytest.approx(0.5)


def test_a_gap_is_counted_and_puts_off_what_is_played_after_it() -> None:
    playback = Playback()
    playback.add(1.0, 0.0)
    assert playback.add(1.0, 3.0) == pytest.approx(2.0 - PLAYER_SECONDS)
    assert playback.left(3.0) == pytest.approx(1.0 - PLAYER_SECONDS)


def test_a_later_segment_begins_with_the_audio_that_is_left() -> None:
    assert Playback(0.5, 10.0).left(10.2) == pytest.approx(0.3)
