"""The owner of a token2wav model's streams.

`Token2WavService` has a thread that decides, one for each worker that renders, and one that sends replies. A stream's
state, its queued requests and its end belong to the first; `submit` only adds to the queue. A stream ends with its
final chunk, an abort, an error, a cancellation, or `idle_seconds` without a request. While a chunk of it is rendered
nothing else happens to it. `scheduler` picks the streams to open and the chunks of a batch.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import compress

import numpy as np

from cosyvoice_triton.config import AdmissionName, Token2WavConfig
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.playback import Playback
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.policy.scheduler import (
    FIRST_CHUNK_WORKER,
    Candidate,
    Start,
    patience,
    pick,
    starts,
    worker_takes,
)
from cosyvoice_triton.token2wav.serving.batch_costs import costs, measure
from cosyvoice_triton.token2wav.serving.batch_thread import BatchThread, BatchThreads, RenderedBatch
from cosyvoice_triton.token2wav.serving.live_streams import LiveStream, LiveStreams
from cosyvoice_triton.token2wav.serving.request_queue import MAX_WAITING, QueuedRequest, Reply, RequestQueue, Starting
from cosyvoice_triton.token2wav.serving.requests import TEST_STREAM, Token2WavRequest
from cosyvoice_triton.token2wav.serving.stats import Stats
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)

SILENCE = np.zeros(0, np.float32)
REAP_SECONDS = 1.0
LOOK_SECONDS = 0.02  # between two looks at listeners who wait to be admitted, or for other first chunks
CANCEL_CHECK_SECONDS = 0.5  # requests that waited for less are not checked for cancellation


class Token2WavService:
    """Renders the chunks of all live streams in batches, most urgent first.

    Each turn answers the batches that are done, frees the streams that were aborted, opens new ones, and gives each
    thread that is free the next batch. On a GPU first chunks have a thread of their own, so that they wait for no other
    batch; `scheduler.worker_takes` says what each thread renders. New listeners are admitted by `Admission`.
    """

    def __init__(
        self,
        engine: Token2Wav,
        *,
        idle_seconds: float,
        admission: AdmissionName = Token2WavConfig.admission,
        max_start_wait_seconds: float = Token2WavConfig.max_start_wait_seconds,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._limits = engine.limits
        self._clock = clock
        self._admission = Admission(self._limits.max_streams, engine.batch_tokens, clock(), by=admission)
        self._streams = LiveStreams(engine, self._admission, idle_seconds)
        self._queue = RequestQueue(
            self._admission, 2 * (self._limits.max_streams + MAX_WAITING), max_start_wait_seconds, clock
        )
        self._served: list[QueuedRequest] = []  # in this turn, taken from the queue
        self._threads = BatchThreads(engine, on_done=self._queue.wake, clock=clock)
        self._gathers = False  # first chunks wait, although a thread is free
        self._batches = 0
        self._chunks = 0
        self._waited_seconds = 0.0
        # Replies are sent in order while the next batch is rendered: passing one to tritonserver takes milliseconds.
        self._replies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token2wav-replies")
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="token2wav", daemon=True)
        self._thread.start()
        self._warm.result()

    def submit(self, request: Token2WavRequest, reply: Reply, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Queue a request. `reply` is called exactly once, with audio or an exception: from a thread of the service, or
        at once for a place that is reserved.

        Raises UnavailableError at once when the queue is full or the service is closed, OverloadedError for a listener
        who is not admitted.
        """
        if not self._queue.add(request, reply, is_cancelled, self._streams):
            reply(SILENCE)

    def stats(self) -> Stats:
        contexts, context_waited_seconds = self._engine.contexts
        return Stats(
            live_streams=len(self._streams),
            queued=len(self._queue),
            cache_bytes=self._engine.cache_bytes,
            batches=self._batches,
            chunks=self._chunks,
            waited_seconds=self._waited_seconds,
            contexts=contexts,
            context_waited_seconds=context_waited_seconds,
            admission=self._admission.values(),
        )

    def test(self) -> None:
        """Render a small stream through the queue, or a whole utterance while all slots are taken: streams that idle in
        all of them must not look like a failure. Raises what a client would get."""
        reply: Future[np.ndarray | BaseException] = Future()
        prompt, tokens = self._engine.sample()
        final = True if self._streams.free > 0 and self._engine.fitting([prompt])[0] else None
        request = Token2WavRequest(TEST_STREAM, start=True, end=True, tokens=tokens, prompt=prompt, final=final)
        self.submit(request, reply.set_result)
        if isinstance(result := reply.result(), BaseException):
            raise result

    def close(self) -> None:
        """Refuse what is queued with UnavailableError, free every stream, end the thread."""
        self._queue.close(UnavailableError("token2wav is shutting down"))
        self._thread.join()

    # --- the service's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._warm_up()
        except BaseException as error:
            self._threads.close()
            self._warm.set_exception(error)
            return
        self._warm.set_result(None)
        try:
            while self._queue.refusal is None:
                version = self._queue.version
                self._reap()
                self._learn()
                if not self._turn():
                    soon = self._gathers or self._queue.admits_later
                    self._queue.wait_for_change(version, LOOK_SECONDS if soon else REAP_SECONDS)
        except BaseException as error:  # of any kind: nobody else would answer the requests
            logger.exception("token2wav has failed and refuses all requests")
            self._queue.close(FatalError(f"token2wav has failed: {error}"))
        self._end()

    def _end(self) -> None:
        """Answer what is left, and free all streams."""
        self._threads.close()
        try:
            self._answer_batches()
        except BaseException:
            logger.exception("a batch could not be answered")
        for queued in [*self._served, *self._threads.in_flight, *self._queue.waiting()]:
            if not queued.replied:
                self._reply(queued, self._queue.refusal or FatalError("token2wav has ended"))
        self._replies.shutdown()
        for stream_id in list(self._streams):
            self._streams.close(stream_id)

    def _warm_up(self) -> None:
        """In each thread that uses the GPU, also in this one."""
        self._threads.warm_up()
        self._threads.call(partial(measure, self._engine, self._admission, self._clock))
        self._engine.close(self._engine.open(self._engine.sample()[0]))

    def _learn(self) -> None:
        now = self._clock()
        self._admission.update(self._queue.listeners(self._streams), self._streams.audio_left(now), now)

    def _turn(self) -> bool:
        """Answer what is done, serve aborts and starts, begin batches; False if there was nothing to do."""
        if faults.take("token2wav_thread"):
            raise RuntimeError("a fault of a test")
        self._served.clear()
        answered = self._answer_batches()
        self._serve_aborts()
        self._admit_waiting()
        opened = self._serve_starts()
        self._serve_batches()
        return answered or opened or bool(self._served)

    def _firsts(self) -> list[QueuedRequest]:
        """The first request of each stream, of which nothing is rendered now."""
        in_flight = self._threads.streams
        return [queued for queued in self._queue.firsts() if queued.stream_id not in in_flight]

    def _serve_aborts(self) -> None:
        """First of all: an abort takes no time, and frees a slot for a stream that waits for one.

        A stream that waits for its place and is aborted is not opened: until then it would only keep its senders
        waiting.
        """
        for queued in self._firsts():
            if queued.stream_id in self._streams and not queued.request.aborts:
                continue
            prompt = queued.request.prompt if self._opens(queued) else None
            waits = not queued.admitted or self._streams.free <= 0 or (prompt and not self._engine.fitting([prompt])[0])
            if waits and self._opens(queued) and queued.stream_id not in self._streams:
                queued = self._drop_if_aborted(queued)
            if queued.request.aborts:
                self._take([queued])
                self._streams.close(queued.stream_id)
                self._reply(queued, SILENCE)

    def _drop_if_aborted(self, start: QueuedRequest) -> QueuedRequest:
        """Refuse the requests of a stream before its abort, which is returned; `start` itself if there is none."""
        own = [queued for queued in self._queue.waiting() if queued.stream_id == start.stream_id]
        end = next((index for index, queued in enumerate(own) if queued.request.aborts), 0)
        for queued in own[:end]:
            self._fail(queued, UnavailableError(f"{queued.stream_id} was ended before it was opened"))
        return own[end]

    def _admit_waiting(self) -> None:
        for queued, refusal in self._queue.admit_waiting(self._streams):
            self._take([queued])
            self._reply(queued, SILENCE if refusal is None else refusal)

    def _serve_starts(self) -> bool:
        """Open the streams that `scheduler.starts` chooses of those whose voices have room, new voices prefilled in
        one batch if the threads allow it; False if there is none. One that is opened for a chunk stays in the queue
        with that chunk.
        """
        firsts = self._firsts()
        opening = [queued for queued in firsts if queued.admitted and self._opens(queued)]
        waiting = [one for queued in opening if (one := self._starting(queued)) is not None]
        waiting = list(compress(waiting, self._engine.fitting([one.prompt for one in waiting])))
        waiting = [one for one in waiting if self._threads.prefills or not one.start.frames]
        if not waiting:
            return False
        now = self._clock()
        live = (self._streams.get(queued.stream_id) for queued in firsts)
        listeners = [stream.playback.left(now) for stream in live if stream is not None]
        order = starts([one.start for one in waiting], listeners, self._limits.prefill_frames, self._streams.free)
        chosen = [waiting[index] for index in order]
        chosen = [one for one in chosen if not self._cancelled(one.queued)]
        begun = self._clock()
        self._prefill({one.start.voice: one.prompt for one in chosen if one.start.frames})
        for queued, prompt, _ in chosen:
            try:
                stream, now = self._engine.open(prompt), self._clock()
            except Exception as error:
                self._fail(queued, error)
                continue
            self._admission.opened(now - queued.arrived_at)
            playback = Playback(queued.request.audio_left, now)
            self._streams.add(queued.stream_id, LiveStream(stream, prompt, now, playback))
            queued.opened = True
            if not queued.request.has_chunk:
                self._take([queued])
                self._reply(queued, SILENCE)
        self._admission.prefilled(self._clock() - begun)
        return bool(chosen)

    def _opens(self, queued: QueuedRequest) -> bool:
        """Whether a stream is to be opened for a request, the first one of its stream in the queue."""
        request = queued.request
        if request.start is False or queued.opened or request.whole or request.aborts:
            return False
        return bool(request.start) or request.stream_id not in self._streams

    def _starting(self, queued: QueuedRequest) -> Starting | None:
        """A start as the scheduler sees it; None if it is invalid, and has its reply."""
        request = queued.request
        self._streams.close(request.stream_id)  # START on a live stream restarts it
        try:
            if request.start is None:
                self._streams.check_not_idled(request.stream_id)
            request.check_speed()
            prompt = request.voice
            frames = self._engine.prefill_frames(prompt)
        except Exception as error:
            self._fail(queued, error)
            return None
        return Starting(queued, prompt, Start(prompt.digest, frames, request.audio_left, queued.arrived))

    def _prefill(self, voices: Mapping[bytes, Prompt]) -> None:
        """Prefill new voices in one batch; a single one is prefilled by opening its stream."""
        if len(voices) < 2:
            return
        try:
            self._engine.prefill(list(voices.values()))
        except Exception:
            logger.exception("%d voices could not be prefilled in one batch; each is tried alone", len(voices))

    def _serve_batches(self) -> None:
        """Give each thread that is free the most urgent chunks that it renders, as one batch, or a request of another
        kind."""
        idle = [thread for thread in self._threads if thread.idle]
        waiting = self._candidates() if idle else []
        for thread in idle:
            candidates = [candidate for candidate, _ in waiting]
            if not (of_worker := worker_takes(thread.worker, self._engine.workers, candidates)):
                continue
            chosen = pick(
                [candidates[index] for index in of_worker],
                self._limits.of_worker(thread.worker).max_chunks,
                self._engine.batch_tokens,
                partial(self._engine.padded, worker=thread.worker),
                waited_for=self._engine.workers == 1,
            )
            batch = [waiting[of_worker[index]][1] for index in chosen]
            self._take(batch)
            waiting = [each for each in waiting if each[1] not in batch]
            if wanted := [queued for queued in batch if not self._cancelled(queued)]:
                self._serve(thread, wanted)
        self._gathers = any(candidate.start for candidate, _ in waiting)

    def _candidates(self) -> list[tuple[Candidate, QueuedRequest]]:
        """The queued requests as the scheduler sees them, and themselves: the first one of each stream that is open.
        The later ones wait for it."""
        now = self._clock()
        candidates: list[tuple[Candidate, QueuedRequest]] = []
        for queued in self._firsts():
            if self._opens(queued):
                continue
            live = self._streams.get(queued.stream_id)
            tokens = self._computed(queued, live) if live else None
            left = self._audio_left(queued, live, now)
            start = left is None and queued.chunk is not None and self._engine.is_first_chunk(queued.chunk)
            start = start and queued.stream_id != TEST_STREAM  # the test is of worker 0
            candidates.append((Candidate(left, queued.arrived, tokens, start, now - queued.arrived_at), queued))
        return candidates

    def _audio_left(self, queued: QueuedRequest, live: LiveStream | None, now: float) -> float | None:
        """Of the request's listener."""
        if queued.request.whole:
            return patience(now - queued.arrived_at)
        return live.playback.left(now) if live else None

    def _computed(self, queued: QueuedRequest, live: LiveStream) -> int | None:
        """How many tokens are computed for the request; None if it is to be served alone."""
        if queued.chunk is None:
            if not queued.request.has_chunk or queued.request.speed != 1.0:
                return None
            try:
                queued.chunk = self._chunk(live, queued.request)
            except ValueError:
                return None  # served alone, which raises it again for the sender
        return queued.chunk.computed

    def _cancelled(self, queued: QueuedRequest) -> bool:
        """Whether the client has gone; its stream is then freed.

        The check is a call to tritonserver, a millisecond under load while the GPU waits, so it is made only where it
        can save much work.
        """
        waited = self._clock() - queued.arrived_at
        if not ((queued.request.whole or waited > CANCEL_CHECK_SECONDS) and queued.client_has_gone()):
            return False
        self._fail(queued, asyncio.CancelledError())
        return True

    def _serve(self, thread: BatchThread, batch: list[QueuedRequest]) -> None:
        """Begin to render a batch of chunks, or serve one request of another kind."""
        if len(batch) == 1:
            (queued,) = batch
            request = queued.request
            if request.whole:
                thread.render(batch, lambda: [self._engine.whole(request.voice, request.tokens, request.speed)])
                return
            try:
                if not self._renders(request):
                    self._reply(queued, SILENCE)
                    return
                if queued.chunk is None:
                    queued.chunk = self._chunk(self._streams[queued.stream_id], request)
            except Exception as error:
                self._fail(queued, error)
                return
        chunks = [queued.chunk for queued in batch if queued.chunk is not None]
        assert len(chunks) == len(batch)
        self._batches += 1
        self._chunks += len(batch)
        self._waited_seconds += sum(self._clock() - queued.arrived_at for queued in batch)
        thread.render(batch, partial(self._engine.render, chunks, thread.worker))

    def _answer_batches(self) -> bool:
        """Reply to the requests of the batches that are done; False if there is none."""
        answered = False
        for thread in self._threads:
            if (rendered := thread.take()) is None:
                continue
            answered = True
            self._served += rendered.batch
            if rendered.batch[0].request.whole:
                (result,) = rendered.results
                if not isinstance(result, Exception):
                    self._admission.rendered_whole(rendered.seconds)
                self._reply(rendered.batch[0], result)
            else:
                self._answer_chunks(rendered, of_starts=thread.worker == FIRST_CHUNK_WORKER)
        return answered

    def _answer_chunks(self, rendered: RenderedBatch, *, of_starts: bool) -> None:
        """Reply to a batch of chunks. of_starts: it was rendered apart, and tells nothing about the others' cost."""
        chunks = [queued.chunk for queued in rendered.batch if queued.chunk is not None]
        # The test's chunk is small, and alone: it tells nothing either.
        if not of_starts and rendered.batch[0].stream_id != TEST_STREAM:
            self._admission.rendered(*costs(self._engine, chunks, rendered.results), rendered.seconds)
        for queued, result in zip(rendered.batch, rendered.results, strict=True):
            live = self._streams[queued.stream_id]
            if isinstance(result, Exception) or queued.request.final:
                self._streams.close(queued.stream_id)
            if not isinstance(result, Exception):
                self._deliver(queued, live, len(result) / SAMPLE_RATE)
            self._reply(queued, result)

    def _deliver(self, queued: QueuedRequest, live: LiveStream, seconds: float) -> None:
        """Count a chunk's audio for its listener, and how narrowly it came."""
        now, awaited = self._clock(), max(0.0, queued.arrived_at - live.used_at)
        left, gap = live.playback.left(now), live.add(seconds, now)
        if left is not None:
            self._admission.delivered(left, awaited, seconds, gap, now)

    def _take(self, requests: Sequence[QueuedRequest]) -> None:
        """Take requests from the queue, to be replied to in this turn."""
        self._queue.take(requests)
        self._served += requests

    def _fail(self, queued: QueuedRequest, error: BaseException) -> None:
        """Reply with an error that ends the stream."""
        self._take([queued])
        self._streams.close(queued.stream_id)
        self._reply(queued, error)

    def _reply(self, queued: QueuedRequest, result: np.ndarray | BaseException) -> None:
        queued.replied = True
        self._replies.submit(queued.send, result)

    def _renders(self, request: Token2WavRequest) -> bool:
        """Whether a request of a live stream has a chunk to render. ValueError if it is invalid."""
        if request.aborts:  # its turn came after `_serve_aborts`
            self._streams.close(request.stream_id)
            return False
        if request.stream_id not in self._streams:
            raise ValueError(
                f"{request.stream_id} is not live: it was not opened, has ended or failed, or was idle for "
                f"{self._streams.idle_seconds:g} s"
            )
        request.check_speed()
        return request.has_chunk

    def _chunk(self, live: LiveStream, request: Token2WavRequest) -> Chunk:
        request.check_voice(live.prompt)
        return self._engine.chunk(live.stream, request.tokens, final=bool(request.final), offset=request.offset)

    def _reap(self) -> None:
        now = self._clock()
        self._streams.reap(now, {queued.stream_id for queued in self._queue.waiting()} | self._threads.streams)
        self._queue.drop_reserved(now - self._streams.idle_seconds)
