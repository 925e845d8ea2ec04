"""The owner of a token2wav model's sessions.

`Token2WavService` has a thread that decides, those of the workers, and one that sends replies. Each session has one
`State`, which the first of them sets; `submit` only adds to the table. A session ends with its final chunk, an abort,
an error, a cancellation, or `idle_seconds` without a request. `ChunkScheduler` picks the streams to open and the chunks
of a batch.
"""

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.monitoring.logs import timed
from cosyvoice_triton.monitoring.metrics import BATCHES, CACHE, CHUNKS, QUEUED, STREAMS, WAITED, Values
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER, Candidate, ChunkScheduler, Opening
from cosyvoice_triton.token2wav.serving.requests import TEST_STREAM, Kind, Reply, Token2WavRequest
from cosyvoice_triton.token2wav.serving.session import Session, Sessions, State
from cosyvoice_triton.token2wav.serving.worker import SWITCH_SECONDS, RenderedBatch, Worker, measure
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)

SILENCE = np.zeros(0, np.float32)
REAP_SECONDS = 1.0  # between two searches for idle sessions while nothing happens
# Between two passes over all sessions. Under load there are hundreds of steps in a second, and their Python holds up
# the threads that start the kernels.
UPDATE_SECONDS = 0.01
CANCEL_CHECK_SECONDS = 0.5  # requests that waited for less are not checked for cancellation


class Token2WavService:
    """Renders the chunks of all live streams in batches, most urgent first.

    Each step answers the batches that are done, ends the streams that were aborted, opens new ones, and gives each
    worker that is idle the next batch. On a GPU first chunks have a worker of their own, so that they wait for no other
    batch. New listeners are admitted by `Admission`.
    """

    def __init__(self, engine: Token2Wav, *, idle_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._engine = engine
        self._limits = engine.limits
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._scheduler = ChunkScheduler(self._limits.profile.scheduler)
        self._batch_tokens = engine.batch_tokens
        self._admission = Admission(self._limits.max_streams, self._batch_tokens, clock(), self._limits.profile)
        self._sessions = Sessions(self._admission, self._limits.max_streams, clock)
        # In the order in which they choose their batches: that of first chunks first, if there is one.
        self._workers: list[Worker] = []
        for number in reversed(range(engine.workers)):
            most = self._limits.of_worker(number).max_chunks
            # Voices are prefilled while the worker of first chunks, or the only one, renders nothing.
            threads = 1 if number == FIRST_CHUNK_WORKER or engine.workers == 1 else 2
            wake = self._sessions.wake
            self._workers.append(Worker(number, max_chunks=most, threads=threads, on_change=wake, clock=clock))
        self._gathering = 0.0  # seconds that first chunks still wait for others, although their worker is idle
        self._updated_at = -math.inf
        self._client_checked_at = clock()
        self._batches, self._chunks, self._waited_seconds = 0, 0, 0.0
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
        request.reply, request.is_cancelled = reply, is_cancelled
        if not self._sessions.add(request):
            reply(SILENCE)

    def stats(self) -> Values:
        """Return the service's current numbers by metric."""
        return {
            STREAMS: self._sessions.streams,
            QUEUED: self._sessions.queued,
            CACHE: self._engine.cache_bytes,
            BATCHES: self._batches,
            CHUNKS: self._chunks,
            WAITED: self._waited_seconds,
            **self._admission.values(self._sessions.listeners, self._sessions.wholes),
        }

    def test(self) -> None:
        """Render a small stream through the queue, or a whole utterance while all slots are taken: streams that idle in
        all of them must not look like a failure. Raises what a client would get."""
        reply: Future[np.ndarray | BaseException] = Future()
        prompt, tokens = self._engine.sample()
        final = True if self._can_open(prompt) else None
        request = Token2WavRequest(TEST_STREAM, start=True, end=True, tokens=tokens, prompt=prompt, final=final)
        self.submit(request, reply.set_result)
        if isinstance(result := reply.result(), BaseException):
            raise result

    def close(self) -> None:
        """Refuse what is queued with UnavailableError, free every stream, end the thread."""
        self._sessions.close(UnavailableError("token2wav is shutting down"))
        self._thread.join()

    def _run(self) -> None:
        try:
            self._warm_up()
        except BaseException as error:
            self._close_workers()
            self._warm.set_exception(error)
            return
        self._warm.set_result(None)
        try:
            while self._sessions.refusal is None:
                version = self._sessions.version
                if not self._step():
                    self._sessions.wait_for_change(version, self._gathering or REAP_SECONDS)
        except BaseException as error:  # of any kind: nobody else would answer the requests
            logger.exception("token2wav has failed and refuses all requests")
            self._sessions.close(FatalError(f"token2wav has failed: {error}"))
        self._end()

    def _step(self) -> bool:
        """Do what there is to do now; False if that was nothing."""
        if faults.take("token2wav_thread"):
            raise RuntimeError("a fault of a test")
        self._update()
        answered = self._answer_batches()
        schedulable = self._sessions.schedulable()
        aborted = self._serve_aborts(schedulable)
        opened = self._open_streams(schedulable)
        begun = self._begin_batches(schedulable)
        return answered or aborted or opened or begun

    def _warm_up(self) -> None:
        """Warm up in each thread that uses the GPU, also in this one, because the GPU libraries cache per thread."""
        with timed("first chunks"):
            if len(self._workers) > 1:
                sys.setswitchinterval(SWITCH_SECONDS)
            for worker in reversed(self._workers):
                worker.call(partial(self._engine.warm_up, worker.number))
            measure(self._engine, self._admission, self._clock)

    def _close_workers(self) -> None:
        """End the threads after what they render."""
        for worker in self._workers:
            worker.close()

    def _end(self) -> None:
        """Answer what is left, and free all streams."""
        self._close_workers()
        try:
            while self._answer_batches():
                pass
        except BaseException:
            logger.exception("a batch could not be answered")
        for session in self._sessions:
            self._free(session)
            while session.requests:
                self._reply(session, self._sessions.refusal or FatalError("token2wav has ended"))
        self._replies.shutdown()

    def _update(self) -> None:
        """End the sessions that have been idle for too long, and tell admission how much audio the listeners have left;
        once in UPDATE_SECONDS."""
        now = self._clock()
        if now - self._updated_at < UPDATE_SECONDS:
            return
        self._updated_at = now
        for session in self._sessions.expire(now - self._idle_seconds):
            if session.stream is not None:
                logger.warning("%s was idle for %.0f s and was freed", session.id, self._idle_seconds)
            self._free(session)
        listeners, audio_left = 0, []
        for session in self._sessions:
            listeners += session.is_listener
            if session.stream is not None and (left := session.playback.left(now)) is not None:
                audio_left.append(left)
        self._admission.update(listeners, audio_left, now)

    def _answer_batches(self) -> bool:
        """Reply to the requests of the batches that are done; False if there is none."""
        answered = False
        for worker in self._workers:
            if (rendered := worker.take()) is None:
                continue
            answered = True
            if rendered.batch[0].first.kind is Kind.WHOLE:
                (session,), (result,) = rendered.batch, rendered.results
                if not isinstance(result, BaseException):
                    self._admission.rendered_whole(rendered.seconds)
                self._reply(session, result)
            else:
                self._answer_chunks(worker, rendered)
        return answered

    def _answer_chunks(self, worker: Worker, rendered: RenderedBatch) -> None:
        """Reply with the chunks' audio, and count for its listener what they had left when it came."""
        longest, samples, is_test = 0, 0, rendered.batch[0].id == TEST_STREAM
        for session, result in zip(rendered.batch, rendered.results, strict=True):
            assert session.chunk is not None
            longest = max(longest, session.chunk.computed)
            if isinstance(result, BaseException):
                self._fail(session, result)
                continue
            samples, seconds, now = samples + len(result), len(result) / SAMPLE_RATE, self._clock()
            awaited, session.used_at = max(0.0, session.first.arrived_at - session.used_at), now
            left, gap = session.playback.left(now), session.playback.add(seconds, now)
            if left is not None:
                self._admission.delivered(left, awaited, seconds, gap, now)
            if session.first.final:
                self._free(session)
                self._sessions.finished(session)
            self._reply(session, result)
        # Batches of first chunks alone, and the test's small chunk, tell nothing about what the others cost.
        if worker.number != FIRST_CHUNK_WORKER and not is_test:
            computed = self._engine.padded(len(rendered.batch), longest)
            self._admission.rendered(len(rendered.batch), computed, samples / SAMPLE_RATE, rendered.seconds)

    def _serve_aborts(self, schedulable: Sequence[Session]) -> bool:
        """Serve aborts first of all: an abort takes no time, and frees a slot for a stream that waits for one. What
        waits before it is not rendered: its listener has left."""
        aborted = False
        for session in schedulable:
            if not session.leaves and session.first.kind is not Kind.ABORT:
                continue
            kinds = [request.kind for request in self._sessions.requests(session)]
            for _ in range(kinds.index(Kind.ABORT)):
                self._reply(session, UnavailableError(f"{session.id} was ended before this was rendered"))
            self._free(session)
            self._reply(session, SILENCE)
            aborted = True
        return aborted

    def _can_open(self, voice: Prompt | None) -> bool:
        return self._sessions.free > 0 and (voice is None or self._engine.fitting([voice])[0])

    def _open_streams(self, schedulable: Sequence[Session]) -> bool:
        """Open streams of those whose voices have room; False if no request was opened or answered. The chunk of a
        stream that is opened for one is rendered next."""
        waiting, voices, failed = [], [], False
        for session in schedulable:
            if not session.is_schedulable or not session.must_open:
                continue
            if (opening := self._opening(session)) is None:
                failed = True  # the next request of such a session is scheduled
            else:
                waiting.append((session, opening))
                voices.append(session.first.voice)
        ready = []
        for each, fits in zip(waiting, self._engine.fitting(voices), strict=True):
            # A prefill uses the memory of the worker of first chunks, or of the only one.
            if fits and (self._workers[0].idle or not each[1].frames):
                ready.append(each)
        return self._open_chosen(ready, schedulable) or failed if ready else failed

    def _open_chosen(self, ready: list[tuple[Session, Opening]], schedulable: Sequence[Session]) -> bool:
        """Open those that the scheduler chooses, new voices prefilled in one batch if the workers allow it."""
        now = self._clock()
        left = [each.playback.left(now) for each in schedulable if each.state is State.READY and each.requests]
        openings = [opening for _, opening in ready]
        order = self._scheduler.opens(openings, left, self._limits.prefill_frames, self._sessions.free)
        chosen = [ready[index] for index in order if not self._cancelled(ready[index][0])]
        for session, _ in chosen:
            session.state = State.OPENING
        begun = self._clock()
        new_voices = {opening.voice: each.first.voice for each, opening in chosen if opening.frames}
        try:
            if len(new_voices) > 1:  # a single one is prefilled by opening its stream
                self._engine.prefill(list(new_voices.values()))
        except Exception:
            logger.exception("%d voices could not be prefilled in one batch; each is tried alone", len(new_voices))
        for session, _ in chosen:
            self._open(session)
        self._admission.prefilled(self._clock() - begun)
        return bool(order)

    def _opening(self, session: Session) -> Opening | None:
        """Return a session that waits for a stream as the scheduler sees it; None if its request is invalid, and has
        its reply."""
        request = session.first
        self._free(session)  # START on a live stream restarts it
        session.state = State.WAITING
        try:
            if request.start is None and self._sessions.has_idled(session):
                raise ValueError(f"{session.id} was idle for {self._idle_seconds:g} s and was freed")
            request.check(None)
            prompt = request.voice
            frames = self._engine.prefill_frames(prompt)
        except Exception as error:
            self._fail(session, error)
            return None
        return Opening(prompt.digest, frames, request.audio_left, request.arrived)

    def _open(self, session: Session) -> None:
        voice = session.first.voice
        try:
            stream, now = self._engine.open(voice, session.first.speed), self._clock()
        except Exception as error:
            self._fail(session, error)
            return
        self._admission.opened(now - session.first.arrived_at)
        session.opened(stream, voice, now)
        if session.first.kind is not Kind.CHUNK:
            self._reply(session, SILENCE)

    def _begin_batches(self, schedulable: Sequence[Session]) -> bool:
        """Give each idle worker a batch; False if there is nothing to render."""
        worked, self._gathering = False, 0.0
        for worker in self._workers:
            if worker.idle:
                worked |= self._begin_batch(worker, schedulable)
        return worked

    def _begin_batch(self, worker: Worker, schedulable: Sequence[Session]) -> bool:
        """Give a worker the most urgent chunks that it renders, as one batch, or a whole utterance; False if there is
        nothing for it, and no request was answered."""
        candidates: list[Candidate] = []
        sessions, worked = [], False
        for session in schedulable:
            if not session.is_schedulable or session.must_open or session.first.kind is Kind.ABORT:
                continue
            if (candidate := self._candidate(session)) is None:
                worked = True
            else:
                candidates.append(candidate)
                sessions.append(session)
        if worker.number == FIRST_CHUNK_WORKER:
            self._gathering = self._scheduler.gathers(candidates)
        takes = self._scheduler.worker_takes(worker.number, len(self._workers), candidates)
        if not takes:
            return worked
        chosen = self._scheduler.pick(
            candidates,
            worker.max_chunks,
            self._batch_tokens,
            partial(self._engine.padded, worker=worker.number),
            waited_for=len(self._workers) == 1,
            among=takes,
        )
        if batch := [sessions[index] for index in chosen if not self._cancelled(sessions[index])]:
            self._begin(worker, batch)
        return True

    def _candidate(self, session: Session) -> Candidate | None:
        """Return a session's first request as the scheduler sees it; None if nothing is to be rendered for it, and it
        has its reply."""
        request, now = session.first, self._clock()
        waited = now - request.arrived_at
        if request.kind is Kind.WHOLE:
            return Candidate(self._scheduler.patience(waited), request.arrived, None, waited=waited)
        if session.chunk is None:
            try:
                session.chunk = self._chunk(session)
            except ValueError as error:
                self._fail(session, error)
                return None
            if session.chunk is None:
                self._reply(session, SILENCE)
                return None
            session.correct_playback()
        left = session.playback.left(now)
        # The test is CHUNK_WORKER's.
        first = left is None and session.id != TEST_STREAM and self._engine.is_first_chunk(session.chunk)
        return Candidate(left, request.arrived, session.chunk.computed, first, waited)

    def _chunk(self, session: Session) -> Chunk | None:
        """Return the chunk of a session's first request; None if it has none. ValueError if it is invalid."""
        request = session.first
        if session.stream is None or session.voice is None:
            raise ValueError(
                f"{session.id} is not live: it was not opened, has ended or failed, or was idle for "
                f"{self._idle_seconds:g} s"
            )
        has_chunk = request.kind is Kind.CHUNK
        request.check(session.voice if has_chunk else None)
        if not has_chunk:
            return None
        return self._engine.chunk(session.stream, request.tokens, final=bool(request.final), offset=request.offset)

    def _begin(self, worker: Worker, batch: Sequence[Session]) -> None:
        """Begin to render the first requests of these sessions."""
        request = batch[0].first
        if request.kind is Kind.WHOLE:
            batch[0].state = State.RENDERING
            go_on = partial(self._check_client, request)
            worker.render(batch, lambda _: [self._engine.whole(request.voice, request.tokens, request.speed, go_on)])
            return
        chunks, now = [], self._clock()
        for session in batch:
            assert session.chunk is not None
            session.state = State.RENDERING
            self._waited_seconds += now - session.first.arrived_at
            chunks.append(session.chunk)
        self._batches += 1
        self._chunks += len(batch)
        worker.render(batch, partial(self._engine.render, chunks, worker.number))

    def _cancelled(self, session: Session) -> bool:
        """Return whether the client has gone; its stream is then freed."""
        request = session.first
        waited = self._clock() - request.arrived_at
        # A call to tritonserver takes a millisecond under load while the GPU waits: only where it can save much work.
        if not ((request.kind is Kind.WHOLE or waited > CANCEL_CHECK_SECONDS) and request.client_has_gone()):
            return False
        self._fail(session, asyncio.CancelledError())
        return True

    def _check_client(self, request: Token2WavRequest) -> None:
        """Raise CancelledError if the client has gone, between the steps of a whole utterance, which may take a minute
        on a CPU. Triton is asked every CANCEL_CHECK_SECONDS: a GPU needs less for all the steps."""
        if (now := self._clock()) - self._client_checked_at < CANCEL_CHECK_SECONDS:
            return
        self._client_checked_at = now
        if request.client_has_gone():
            raise asyncio.CancelledError

    def _fail(self, session: Session, error: BaseException) -> None:
        """Reply with an error that ends the stream."""
        self._free(session)
        self._reply(session, error)

    def _free(self, session: Session) -> None:
        """Free the session's stream, if it has one."""
        stream, session.stream = session.stream, None
        if stream is not None:
            self._admission.ended()
            self._engine.close(stream)

    def _reply(self, session: Session, result: np.ndarray | BaseException) -> None:
        """Reply to the session's first request."""
        self._replies.submit(self._sessions.answered(session).answer, result)
