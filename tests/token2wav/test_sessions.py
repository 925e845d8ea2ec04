"""The table of sessions of a token2wav service."""

import numpy as np
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.serving.session import Session, Sessions

from tests.support.fake_engine import PROMPT


class Table:
    """Sessions with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sessions = Sessions(Admission(8, 1600, 0.0), 8, lambda: self.now)

    def ask(self, name: str) -> Session:
        """Ask for a segment whose listener is said to have a second of audio left."""
        request = Token2WavRequest(name, start=True, end=True, tokens=np.arange(3), prompt=PROMPT, audio_left=1.0)
        self.sessions.add(request)
        return next(session for session in self.sessions if session.id == name)

    def end(self, session: Session) -> None:
        """End the first segment of a session with its final chunk."""
        self.sessions.finished(session)
        self.sessions.answered(session)

    def remembers(self, name: str) -> bool:
        """Return whether a further segment is known to have a listener: only then is it believed what audio is left."""
        return self.ask(name).first.audio_left is not None


def test_streams_that_ended_long_ago_are_forgotten() -> None:
    table = Table()
    for name in ("a", "b", "c", "d"):
        table.end(table.ask(name))
        table.now += 1
    table.sessions.expire(before=2.0)
    assert [table.remembers(name) for name in ("a", "b", "c", "d")] == [False, False, True, True]


def test_a_stream_whose_next_segment_came_early_is_remembered_from_its_last_end_on() -> None:
    table = Table()
    session = table.ask("a")
    table.ask("a")
    table.end(session)
    table.end(table.ask("b"))
    table.now = 50.0
    table.end(session)
    table.sessions.expire(before=40.0)
    assert [table.remembers("a"), table.remembers("b")] == [True, False]
