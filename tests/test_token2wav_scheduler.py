"""Which chunks are rendered next and together."""

from common.token2wav.scheduler import Waiting, pick


def chunk(stream: int, *, audio_left: float | None = None, tokens: int | None = 15, arrived: int = 0) -> Waiting:
    return Waiting(stream, audio_left, arrived, tokens)


def test_first_chunks_come_first_then_the_earliest_silence_then_arrival() -> None:
    waiting = [
        chunk(0, audio_left=0.9),
        chunk(1, audio_left=0.3),
        chunk(2, arrived=8),
        chunk(3, arrived=7),
        chunk(4, audio_left=0.3, arrived=-1),
    ]
    assert pick(waiting, max_chunks=64, max_tokens=1600) == [3, 2, 4, 1, 0]


def test_a_batch_holds_the_most_urgent_up_to_its_limit() -> None:
    waiting = [chunk(stream, audio_left=10.0 - stream) for stream in range(5)]
    assert pick(waiting, max_chunks=2, max_tokens=1600) == [4, 3]


def test_chunks_of_all_lengths_share_a_batch_as_long_as_it_holds_them_padded() -> None:
    waiting = [chunk(0, tokens=15), chunk(1, tokens=100, arrived=1), chunk(2, tokens=8, arrived=2)]
    assert pick(waiting, max_chunks=64, max_tokens=300) == [0, 1, 2]
    assert pick(waiting, max_chunks=64, max_tokens=199) == [0, 2]


def test_what_renders_nothing_is_served_alone() -> None:
    waiting = [chunk(0, tokens=None), chunk(1), chunk(2, tokens=None)]
    assert pick(waiting, max_chunks=64, max_tokens=1600) == [0]
    assert pick(waiting[1:], max_chunks=64, max_tokens=1600) == [0]


def test_a_streams_requests_keep_their_order() -> None:
    """The second chunk of stream 1 waits, also where the first is of another size or no chunk at all."""
    assert pick([chunk(0), chunk(1, arrived=1), chunk(1, arrived=2)], max_chunks=64, max_tokens=1600) == [0, 1]
    assert pick([chunk(0), chunk(1, tokens=90, arrived=1), chunk(1, arrived=2)], max_chunks=64, max_tokens=100) == [0]
    assert pick([chunk(0), chunk(1, tokens=None, arrived=1), chunk(1, arrived=2)], max_chunks=64, max_tokens=1600) == [
        0
    ]


def test_a_batch_is_bounded_in_tokens_but_never_empty() -> None:
    waiting = [chunk(stream, tokens=100, arrived=stream) for stream in range(4)]
    assert pick(waiting, max_chunks=64, max_tokens=250) == [0, 1]
    assert pick(waiting, max_chunks=64, max_tokens=10) == [0]


def test_a_first_chunk_is_not_held_up_by_chunks_that_could_wait() -> None:
    """Sixteen listeners have plenty of audio left: beside a stream that begins few of them are rendered, and before one
    that is about to begin no batch is long. Those who are about to fall silent take the whole batch."""
    idle = [chunk(stream, audio_left=4.0, tokens=100, arrived=stream) for stream in range(16)]
    assert pick([*idle, chunk(16, arrived=16)], max_chunks=64, max_tokens=1600) == [16, 0, 1, 2]
    assert pick(idle, max_chunks=64, max_tokens=1600) == [0, 1, 2, 3]
    late = [chunk(stream, audio_left=0.2, tokens=100, arrived=stream) for stream in range(16)]
    assert pick(late, max_chunks=64, max_tokens=1600) == list(range(16))
    assert pick([*late[:8], *idle[8:]], max_chunks=64, max_tokens=1600) == list(range(8))
