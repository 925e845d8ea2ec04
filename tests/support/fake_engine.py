"""An engine for the tests of the token2wav service that needs no networks, and a client of that service."""

import queue
import threading
from dataclasses import dataclass, field

import numpy as np
from cosyvoice_triton.constants import HOP_SAMPLES, MEL_BINS, SPEAKER_DIM
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.serving.service import Token2WavService
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.voice.prompt import Prompt

PROMPT = Prompt(
    tokens=np.arange(5), mel=np.zeros((10, MEL_BINS), np.float32), embedding=np.zeros(SPEAKER_DIM, np.float32), text=""
)


NO_TOKENS = np.zeros(0, np.int64)


@dataclass
class FakeStream:
    rendered: int = 0
    speed: float = 1.0


@dataclass
class FakeEngine:
    """Answers a chunk with two frames of audio per token. Token 12 makes it fail alone, 13 with its batch, 14 before it
    is rendered, 15 ends the service.

    `gate` holds every step back, `starts_gate` those of first chunks, which a second worker renders apart; `batches`
    and `starts` are the first tokens of the chunks that each has rendered together. `solves`: whether another batch may
    follow while one does. `broken` is what the service did that an engine does not allow.
    """

    workers: int = 1
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    batches: list[list[int]] = field(default_factory=list)
    starts_gate: threading.Event = field(default_factory=threading.Event)
    starts_entered: threading.Event = field(default_factory=threading.Event)
    starts: list[list[int]] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)  # voices that need no prefill
    prefills: list[int] = field(default_factory=list)  # voices that were prefilled together
    room: int = 99  # for streams, each in a voice of its own
    live: int = 0
    batch_tokens: int = 1600
    cache_bytes: int = 4096
    solves: bool = False
    limits: BatchLimits = BatchLimits(max_streams=4)
    broken: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.gate.set()
        self.starts_gate.set()
        self._lock = threading.Lock()
        self.rendering = []  # workers and their chunks

    def warm_up(self, worker=0):
        pass

    def is_first_chunk(self, chunk):
        return chunk.offset == 0 and chunk.new <= 20

    def padded(self, chunks, tokens, worker=0):
        return chunks * tokens

    def sample(self, tokens=3):
        return PROMPT, np.zeros(tokens, np.int64)

    def prefill_frames(self, prompt):
        return 0 if prompt.digest in self.known else len(prompt.mel)

    def fitting(self, prompts):
        return [self.live < self.room for _ in prompts]

    def prefill(self, prompts):
        for prompt in prompts:
            self._prefills(prompt)
        self.prefills.append(len(prompts))
        self.known |= {prompt.digest for prompt in prompts}

    def open(self, prompt, speed=1.0):
        self._prefills(prompt)
        self.known.add(prompt.digest)
        self.live += 1
        return FakeStream(speed=speed)

    def close(self, stream):
        in_use = [chunk.stream for _, chunks in self.rendering for chunk in chunks]
        self._expect(all(stream is not each for each in in_use), "a stream is closed while it is rendered")
        self.live -= 1

    def chunk(self, stream, tokens, *, final, offset=None):
        if 14 in tokens:
            raise ValueError("bad chunk")
        if 15 in tokens:
            raise RuntimeError("the scheduler's own mistake")
        return Chunk(stream, tokens, final, stream.rendered, len(tokens), len(tokens))

    def render(self, chunks, worker=0, on_solved=lambda: None):
        starts = worker == FIRST_CHUNK_WORKER
        with self._lock:
            at_once = [other for other, _ in self.rendering].count(worker)
            self._expect(at_once <= (self.solves and not starts), "too many batches at once")
            others = [chunk.stream for _, rendering in self.rendering for chunk in rendering]
            self._expect(all(c.stream is not o for c in chunks for o in others), "a stream is in two workers")
            self._expect(not starts or all(map(self.is_first_chunk, chunks)), "no first chunk, rendered as one")
            self.rendering.append(mine := (worker, chunks))
        try:
            if starts:
                self.starts_entered.set()
                self.starts_gate.wait(10)
                return self.audio(chunks, self.starts)
            self.entered.set()
            if self.solves:
                on_solved()
            self.gate.wait(10)
            return self.audio(chunks, self.batches)
        finally:
            self.rendering.remove(mine)

    def audio(self, chunks, batches):
        if any(13 in chunk.tokens for chunk in chunks):
            raise RuntimeError("broken chunk")
        for chunk in chunks:  # as the engine does: a chunk continues the stream as it was when the chunk was made
            assert chunk.offset == chunk.stream.rendered
            chunk.stream.rendered += chunk.new
        batches.append([int(chunk.tokens[0]) for chunk in chunks])
        samples = [int(len(chunk.tokens) * 2 * HOP_SAMPLES / chunk.stream.speed) for chunk in chunks]
        audio = [np.full(n, chunk.tokens[0], np.float32) for n, chunk in zip(samples, chunks, strict=True)]
        return [RuntimeError("bad chunk") if 12 in c.tokens else one for c, one in zip(chunks, audio, strict=True)]

    def whole(self, prompt, tokens, speed, before_step=lambda: None):
        return np.full(int(len(tokens) * 2 * HOP_SAMPLES / speed), tokens[0], np.float32)

    def _expect(self, holds, what):
        if not holds:
            self.broken.append(what)

    def _prefills(self, prompt):
        free = all(worker != FIRST_CHUNK_WORKER for worker, _ in self.rendering)
        self._expect(prompt.digest in self.known or free, "a prefill beside first chunks")


def two_workers(**options):
    """An engine that renders first chunks apart."""
    return FakeEngine(workers=2, **{"limits": BatchLimits(max_streams=32), **options})


class Client:
    """Sends requests and waits for their replies."""

    def __init__(self, service):
        self.service = service

    def post(self, stream_id, tokens=NO_TOKENS, is_cancelled=lambda: False, **kwargs):
        stream_id = f"sequence {stream_id}" if isinstance(stream_id, int) else stream_id
        request = Token2WavRequest(stream_id, **{"start": False, "end": False, **kwargs}, tokens=np.asarray(tokens))
        replies = queue.Queue()
        self.service.submit(request, replies.put, is_cancelled)
        return replies

    def send(self, *args, **kwargs):
        reply = self.post(*args, **kwargs).get(timeout=10)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def start(self, stream_id, tokens=NO_TOKENS):
        return self.send(stream_id, tokens, start=True, prompt=PROMPT)

    def heard(self, stream_id):
        """A segment is rendered to its end, so that the next one of this id has its listener."""
        self.send(stream_id, [20], start=True, end=True, final=True, prompt=PROMPT)


def value(replies):
    """The first sample of an answer, None of an empty one."""
    reply = replies.get(timeout=10)
    if isinstance(reply, BaseException):
        raise reply
    return float(reply[0]) if len(reply) else None


def answered(replies):
    """Whether all that was asked has audio, which may be empty; waits for it."""
    return all(isinstance(reply.get(timeout=60), np.ndarray) for reply in replies)


def started(engine, clock, **settings):
    """A service that has measured its engine."""
    service = Token2WavService(engine, idle_seconds=5.0, clock=clock, **settings)
    engine.batches.clear()
    engine.entered.clear()
    engine.known.clear()
    return service


def running_chunk(client, engine, stream, tokens):
    """The replies to a later chunk of a stream, which the engine renders until its gate is set."""
    engine.gate.clear()
    engine.entered.clear()
    replies = client.post(stream, tokens, final=False)
    assert engine.entered.wait(10)
    return replies


def queue_behind_a_running_chunk(client, engine, chunks):
    """Streams 0 (which is rendering token 40) and those of `chunks`, whose chunks wait; their replies in order."""
    for stream in (0, *chunks):
        client.start(stream)
    running = running_chunk(client, engine, 0, [40])
    return [running, *(client.post(stream, tokens, final=False) for stream, tokens in chunks.items())]


NEW = {"start": True, "prompt": PROMPT}
