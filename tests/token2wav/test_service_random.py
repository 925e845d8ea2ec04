"""The service under a random load of many clients, in real time. The engine is a fake."""

import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from cosyvoice_triton.constants import SPEAKER_DIM
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.monitoring.metrics import QUEUED, STREAMS
from cosyvoice_triton.profiles import UNLIMITED, Profile
from cosyvoice_triton.token2wav.serving.service import Token2WavService

from tests.support.fake_engine import PROMPT, Client, FakeEngine, FakeWorkers

# Chunks fail together in a batch, and what comes after a failed one finds no stream.
FAILURES = "bad chunk", "broken chunk", "is not live", "was ended before"


class Talker(threading.Thread):
    """A client with many streams, one after another; `wrong` is what it got and did not expect."""

    def __init__(self, service, seed, streams):
        super().__init__()
        self._client, self._random = Client(service), np.random.default_rng(seed)
        self._ids = [f"{seed}-{number}" for number in range(streams)]
        self.wrong, self.answered = [], 0

    def run(self):
        for stream in self._ids:
            try:
                posted = self._whole(stream) if self._random.random() < 0.1 else self._stream(stream)
                for replies, token in posted:
                    self._check(stream, replies, token)
            except BaseException as error:
                self.wrong.append(f"{stream}: {error!r}")

    def _voice(self):
        return replace(PROMPT, embedding=np.full(SPEAKER_DIM, self._random.integers(6), np.float32))

    def _whole(self, stream):
        return [(self._client.post(stream, [7], start=True, end=True, prompt=self._voice()), 7)]

    def _stream(self, stream):
        """Posts chunks ahead of their answers, of which one may fail, then a final one or an abort. Returns each one's
        replies and the token that they are of."""
        tokens = self._random.integers(16, 60, self._random.integers(1, 7)).tolist()
        if self._random.random() < 0.1:
            tokens[-1] = int(self._random.choice([12, 13, 14]))
        aborted = self._random.random() < 0.3
        posted = []
        for number, token in enumerate(tokens):
            final = not aborted and number == len(tokens) - 1
            opening = {"start": True, "prompt": self._voice()} if number == 0 else {}
            if number == 0 and self._random.random() < 0.2:  # of a later segment, which waits for a slot
                opening["audio_left"] = 1.0
            length = 30 if self._random.random() < 0.1 else 2
            chunk = self._post(stream, [token] * length, final=final, end=final, **opening)
            posted.append((chunk, token))
            if self._random.random() < 0.3:
                time.sleep(self._random.random() / 500)
        return [*posted, (self._client.post(stream, end=True), None)] if aborted else posted

    def _post(self, *args, **kwargs):
        while True:
            try:
                return self._client.post(*args, **kwargs)
            except OverloadedError:
                time.sleep(0.002)

    def _check(self, stream, replies, token):
        reply = replies.get(timeout=30)
        self.answered += 1
        if isinstance(reply, BaseException):
            expected = any(failure in str(reply) for failure in FAILURES)
        else:
            expected = (float(reply[0]) if len(reply) else None) == token
        if not expected or not replies.empty():
            self.wrong.append(f"{stream}: {reply!r} for {token}, and {replies.qsize()} more replies")


@pytest.mark.parametrize("kind", [FakeEngine, FakeWorkers])
def test_many_random_streams_get_their_own_audio_in_order(kind):
    """More clients than slots; random lengths of batches, failures and aborts."""
    limits = replace(kind.limits, profile=Profile(admission=UNLIMITED))
    engine, random, interval = kind(limits=limits), np.random.default_rng(0), sys.getswitchinterval()
    engine.gate.wait = lambda _: time.sleep(random.random() / 1000)
    if kind is FakeWorkers:
        engine.starts_gate.wait = engine.gate.wait
    sys.setswitchinterval(1e-5)  # the threads meet at more places
    service = Token2WavService(engine, idle_seconds=60.0)
    talkers = [Talker(service, seed, streams=30) for seed in range(32)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join(60)
    assert [wrong for talker in talkers for wrong in talker.wrong] == []
    assert sum(talker.answered for talker in talkers) > 2500 and len(engine.batches) > 50
    stats = service.stats()
    service.close()
    sys.setswitchinterval(interval)
    assert (stats[STREAMS], stats[QUEUED], engine.live) == (0, 0, 0)
    if kind is FakeWorkers:
        assert engine.broken == [] and len(engine.starts) > 50
