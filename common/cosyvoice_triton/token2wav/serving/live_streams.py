"""The live streams of a token2wav service. One thread owns them."""

import logging
from collections import deque
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from cosyvoice_triton.playback import Playback
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.stream import Stream
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)


@dataclass
class LiveStream:
    """A live stream: the engine's part, its voice, and what its listener still has to play."""

    stream: Stream
    prompt: Prompt
    used_at: float
    playback: Playback

    def add(self, seconds: float, now: float) -> float:
        """Count audio that was rendered; returns the gap before it, see `Playback.add`."""
        self.used_at = now
        return self.playback.add(seconds, now)


class LiveStreams(Mapping[str, LiveStream]):
    """By their ids. A stream is freed in `close`, whatever ends it."""

    def __init__(self, engine: Token2Wav, admission: Admission, idle_seconds: float):
        self._engine = engine
        self._admission = admission
        self._streams: dict[str, LiveStream] = {}
        self._most = engine.limits.max_streams
        self._idled: deque[str] = deque(maxlen=self._most)  # those freed last because they were idle
        self.idle_seconds = idle_seconds

    def __getitem__(self, stream_id: str) -> LiveStream:
        return self._streams[stream_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def free(self) -> int:
        """Streams that can be opened now."""
        return self._most - len(self._streams)

    def add(self, stream_id: str, live: LiveStream) -> None:
        self._streams[stream_id] = live

    def close(self, stream_id: str) -> None:
        """Free it, if it is live."""
        if live := self._streams.pop(stream_id, None):
            self._engine.close(live.stream)
            self._admission.ended()

    def audio_left(self, now: float) -> list[float]:
        """Of the listeners who have heard something."""
        left = [live.playback.left(now) for live in self._streams.values()]
        return [each for each in left if each is not None]

    def reap(self, now: float, busy: Container[str]) -> None:
        """Free those that have been idle for too long; not those in `busy`."""
        oldest = now - self.idle_seconds
        for stream_id in [i for i, s in self._streams.items() if s.used_at < oldest and i not in busy]:
            logger.warning("%s was idle for %.0f s and was freed", stream_id, self.idle_seconds)
            self.close(stream_id)
            self._idled.append(stream_id)

    def check_not_idled(self, stream_id: str) -> None:
        """ValueError, once, for a stream that was freed because it was idle: its sender thinks that it is live."""
        if stream_id in self._idled:
            self._idled.remove(stream_id)  # the sender knows now: the next request opens a stream
            raise ValueError(f"{stream_id} was idle for {self.idle_seconds:g} s and was freed")
