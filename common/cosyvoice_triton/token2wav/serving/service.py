"""The owner of a token2wav model's sessions.

`Token2WavService` has a thread that decides, one for each worker that renders, and one that sends replies. Each session
has one `State`, which the first of them sets; `submit` only adds to the table. A session ends with its final chunk, an
abort, an error, a cancellation, or `idle_seconds` without a request. `ChunkScheduler` picks the streams to open and the
chunks of a batch.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import compress, takewhile

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.monitoring.logs import timed
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER, Candidate, ChunkScheduler, Opening
from cosyvoice_triton.token2wav.serving.batch_costs import costs, measure
from cosyvoice_triton.token2wav.serving.requests import TEST_STREAM, Token2WavRequest
from cosyvoice_triton.token2wav.serving.session import QueuedRequest, Reply, Session, Sessions, State
from cosyvoice_triton.token2wav.serving.stats import Stats
from cosyvoice_triton.token2wav.serving.worker import RenderedBatch, Worker, Workers
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)

SILENCE = np.zeros(0, np.float32)
REAP_SECONDS = 1.0  # between two looks for idle sessions while nothing happens
# Between two looks at all sessions. Under load there are hundreds of steps in a second, and their Python holds up the
# threads that start the kernels.
LOOK_SECONDS = 0.01
CANCEL_CHECK_SECONDS = 0.5  # requests that waited for less are not checked for cancellation


class Token2WavService:
    """Renders the chunks of all live streams in batches, most urgent first.

    Each step answers the batches that are done, ends the streams that were aborted, opens new ones, and gives each
    worker that is idle the next batch. On a GPU first chunks have a worker of their own, so that they wait for no other
    batch. New listeners are admitted by `Admission`.
    """

    def __init__(
        self,
        engine: Token2Wav,
        *,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._limits = engine.limits
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._scheduler = ChunkScheduler(self._limits.profile.scheduler)
        self._admission = Admission(self._limits.max_streams, engine.batch_tokens, clock(), self._limits.profile)
        self._sessions = Sessions(self._admission, self._limits.max_streams, clock)
        self._workers = Workers(engine, on_done=self._sessions.wake, clock=clock)
        self._gathering = 0.0  # seconds that first chunks still wait for others, although their worker is idle
        self._looked_at = -math.inf
        self._client_checked_at = clock()
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
        if not self._sessions.add(request, reply, is_cancelled):
            reply(SILENCE)

    def stats(self) -> Stats:
        """Return the service's current numbers."""
        return Stats(
            live_streams=self._sessions.streams,
            queued=self._sessions.queued,
            cache_bytes=self._engine.cache_bytes,
            batches=self._batches,
            chunks=self._chunks,
            waited_seconds=self._waited_seconds,
            admission=self._admission.values(self._sessions.listeners, self._sessions.wholes),
        )

    def test(self) -> None:
        """Render a small stream through the queue, or a whole utterance while all slots are taken: streams that idle in
        all of them must not look like a failure. Raises what a client would get."""
        reply: Future[np.ndarray | BaseException] = Future()
        prompt, tokens = self._engine.sample()
        final = True if self._sessions.free > 0 and self._engine.fitting([prompt])[0] else None
        request = Token2WavRequest(TEST_STREAM, start=True, end=True, tokens=tokens, prompt=prompt, final=final)
        self.submit(request, reply.set_result)
        if isinstance(result := reply.result(), BaseException):
            raise result

    def close(self) -> None:
        """Refuse what is queued with UnavailableError, free every stream, end the thread."""
        self._sessions.close(UnavailableError("token2wav is shutting down"))
        self._thread.join()

    # --- the service's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._warm_up()
        except BaseException as error:
            self._workers.close()
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
        self._look()
        answered = self._answer_batches()
        turns = [session for session in self._sessions if session.has_turn]
        aborted = self._serve_aborts(turns)
        opened = self._open_streams(turns)
        begun = self._begin_batches(turns)
        return answered or aborted or opened or begun

    def _warm_up(self) -> None:
        """Warm up in each thread that uses the GPU, also in this one."""
        with timed("first chunks"):
            self._workers.warm_up()
            self._workers.call(partial(measure, self._engine, self._admission, self._clock))
            self._engine.close(self._engine.open(self._engine.sample()[0]))

    def _end(self) -> None:
        """Answer what is left, and free all streams."""
        self._workers.close()
        try:
            self._answer_batches()
        except BaseException:
            logger.exception("a batch could not be answered")
        for session in self._sessions:
            self._free(session)
            while session.requests:
                self._reply(session, self._sessions.refusal or FatalError("token2wav has ended"))
        self._replies.shutdown()

    def _look(self) -> None:
        """End the sessions that have been idle for too long, and tell admission how the listeners are; once in
        LOOK_SECONDS."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        for session in self._sessions.expire(now - self._idle_seconds):
            if session.stream is not None:
                logger.warning("%s was idle for %.0f s and was freed", session.id, self._idle_seconds)
            self._free(session)
        left = [session.playback.left(now) for session in self._sessions if session.stream is not None]
        self._admission.update(self._sessions.listeners, [each for each in left if each is not None], now)

    # --- batches that are done ---

    def _answer_batches(self) -> bool:
        """Reply to the requests of the batches that are done; False if there is none."""
        done = [(worker, rendered) for worker in self._workers if (rendered := worker.take()) is not None]
        for worker, rendered in done:
            if rendered.batch[0].first.request.whole:
                self._answer_whole(rendered)
            else:
                self._answer_chunks(worker, rendered)
        return bool(done)

    def _answer_whole(self, rendered: RenderedBatch) -> None:
        (session,), (result,) = rendered.batch, rendered.results
        if not isinstance(result, BaseException):
            self._admission.rendered_whole(rendered.seconds)
        self._reply(session, result)

    def _answer_chunks(self, worker: Worker, rendered: RenderedBatch) -> None:
        # Batches of first chunks alone, and the test's small chunk, tell nothing about what the others cost.
        if worker.number != FIRST_CHUNK_WORKER and rendered.batch[0].id != TEST_STREAM:
            chunks = [session.chunk for session in rendered.batch if session.chunk is not None]
            self._admission.rendered(*costs(self._engine, chunks, rendered.results), rendered.seconds)
        for session, result in zip(rendered.batch, rendered.results, strict=True):
            if isinstance(result, BaseException):
                self._fail(session, result)
                continue
            self._deliver(session, len(result) / SAMPLE_RATE)
            if session.first.request.final:
                self._free(session)
                self._sessions.heard(session)
            self._reply(session, result)

    def _deliver(self, session: Session, seconds: float) -> None:
        """Count a chunk's audio for its listener, and how narrowly it came."""
        now = self._clock()
        awaited, session.used_at = max(0.0, session.first.arrived_at - session.used_at), now
        left, gap = session.playback.left(now), session.playback.add(seconds, now)
        if left is not None:
            self._admission.delivered(left, awaited, seconds, gap, now)

    # --- aborts ---

    def _serve_aborts(self, turns: Sequence[Session]) -> bool:
        """Serve aborts first of all: an abort takes no time, and frees a slot for a stream that waits for one. turns:
        sessions that had their turn when the step began.

        A stream that cannot be opened now and is aborted is never opened: it would only keep its sender waiting.
        """
        aborted = False
        for session in turns:
            if session.stream is None and session.must_open:
                requests = [queued.request for queued in self._sessions.requests(session)]
                if any(request.aborts for request in requests) and not self._can_open(session):
                    for _ in takewhile(lambda request: not request.aborts, requests):
                        self._reply(session, UnavailableError(f"{session.id} was ended before it was opened"))
            if session.aborts:
                self._free(session)
                self._reply(session, SILENCE)
                aborted = True
        return aborted

    def _can_open(self, session: Session) -> bool:
        prompt = session.first.request.prompt
        return self._sessions.free > 0 and (prompt is None or self._engine.fitting([prompt])[0])

    # --- streams that are opened ---

    def _open_streams(self, turns: Sequence[Session]) -> bool:
        """Open the streams that the scheduler chooses of those whose voices have room, new voices prefilled in one
        batch if the workers allow it; False if no request was opened or answered. The chunk of a stream that is opened
        for one is rendered next."""
        sessions = [each for each in turns if each.has_turn and each.must_open]
        waiting = [(each, opening) for each in sessions if (opening := self._opening(each)) is not None]
        failed = len(waiting) < len(sessions)  # the next request of such a session has its turn
        waiting = list(compress(waiting, self._engine.fitting([each.first.request.voice for each, _ in waiting])))
        waiting = [(each, opening) for each, opening in waiting if self._workers.can_prefill or not opening.frames]
        if not waiting:
            return failed
        now = self._clock()
        left = [each.playback.left(now) for each in turns if each.state is State.READY and each.requests]
        openings = [opening for _, opening in waiting]
        order = self._scheduler.opens(openings, left, self._limits.prefill_frames, self._sessions.free)
        chosen = [waiting[index] for index in order if not self._cancelled(waiting[index][0])]
        for session, _ in chosen:
            session.state = State.OPENING
        begun = self._clock()
        self._prefill({opening.voice: each.first.request.voice for each, opening in chosen if opening.frames})
        for session, _ in chosen:
            self._open(session)
        self._admission.prefilled(self._clock() - begun)
        return failed or bool(order)

    def _opening(self, session: Session) -> Opening | None:
        """Return a session that waits for a stream as the scheduler sees it; None if its request is invalid, and has
        its reply."""
        queued = session.first
        self._free(session)  # START on a live stream restarts it
        session.state = State.WAITING
        try:
            if queued.request.start is None and self._sessions.has_idled(session):
                raise ValueError(f"{session.id} was idle for {self._idle_seconds:g} s and was freed")
            queued.request.check_speed()
            prompt = queued.request.voice
            frames = self._engine.prefill_frames(prompt)
        except Exception as error:
            self._fail(session, error)
            return None
        return Opening(prompt.digest, frames, queued.request.audio_left, queued.arrived)

    def _prefill(self, voices: Mapping[bytes, Prompt]) -> None:
        """Prefill new voices in one batch; a single one is prefilled by opening its stream."""
        if len(voices) < 2:
            return
        try:
            self._engine.prefill(list(voices.values()))
        except Exception:
            logger.exception("%d voices could not be prefilled in one batch; each is tried alone", len(voices))

    def _open(self, session: Session) -> None:
        voice = session.first.request.voice
        try:
            stream, now = self._engine.open(voice), self._clock()
        except Exception as error:
            self._fail(session, error)
            return
        self._admission.opened(now - session.first.arrived_at)
        session.opened(stream, voice, now)
        if not session.first.request.has_chunk:
            self._reply(session, SILENCE)

    # --- batches that begin ---

    def _begin_batches(self, turns: Sequence[Session]) -> bool:
        """Give each idle worker the most urgent chunks that it renders, as one batch, or a whole utterance; False if
        there is nothing to render."""
        idle = [worker for worker in self._workers if worker.idle]
        turns = [each for each in turns if each.has_turn] if idle else []
        sessions = [each for each in turns if not each.must_open and not each.aborts]
        waiting = [(candidate, each) for each in sessions if (candidate := self._candidate(each)) is not None]
        worked = len(waiting) < len(sessions)
        self._gathering = 0.0
        for worker in idle:
            candidates = [candidate for candidate, _ in waiting]
            if worker.number == FIRST_CHUNK_WORKER:
                self._gathering = self._scheduler.gathers(candidates)
            if not (takes := self._scheduler.worker_takes(worker.number, len(self._workers), candidates)):
                continue
            chosen = self._scheduler.pick(
                [candidates[index] for index in takes],
                self._limits.of_worker(worker.number).max_chunks,
                self._engine.batch_tokens,
                partial(self._engine.padded, worker=worker.number),
                waited_for=len(self._workers) == 1,
            )
            batch = [waiting[takes[index]][1] for index in chosen]
            waiting = [each for each in waiting if each[1] not in batch]
            if wanted := [session for session in batch if not self._cancelled(session)]:
                self._begin(worker, wanted)
            worked = True
        return worked

    def _candidate(self, session: Session) -> Candidate | None:
        """Return a session's first request as the scheduler sees it; None if nothing is to be rendered for it, and it
        has its reply."""
        queued, waited = session.first, self._clock() - session.first.arrived_at
        if queued.request.whole:
            return Candidate(self._scheduler.patience(waited), queued.arrived, None, waited=waited)
        if session.chunk is None:
            try:
                session.chunk = self._chunk(session)
            except ValueError as error:
                self._fail(session, error)
                return None
            if session.chunk is None:
                self._reply(session, SILENCE)
                return None
        left = session.playback.left(self._clock())
        first = left is None and self._engine.is_first_chunk(session.chunk)
        first = first and session.id != TEST_STREAM  # the test is CHUNK_WORKER's
        return Candidate(left, queued.arrived, session.chunk.computed, first, waited)

    def _chunk(self, session: Session) -> Chunk | None:
        """Return the chunk of a session's first request; None if it has none. ValueError if it is invalid."""
        request = session.first.request
        if session.stream is None or session.voice is None:
            raise ValueError(
                f"{session.id} is not live: it was not opened, has ended or failed, or was idle for "
                f"{self._idle_seconds:g} s"
            )
        request.check_speed()
        if not request.has_chunk:
            return None
        request.check_voice(session.voice)
        return self._engine.chunk(session.stream, request.tokens, final=bool(request.final), offset=request.offset)

    def _begin(self, worker: Worker, batch: Sequence[Session]) -> None:
        """Begin to render the first requests of these sessions."""
        for session in batch:
            session.state = State.RENDERING
        request = batch[0].first.request
        if request.whole:
            go_on = partial(self._check_client, batch[0].first)
            worker.render(batch, lambda: [self._engine.whole(request.voice, request.tokens, request.speed, go_on)])
            return
        self._batches += 1
        self._chunks += len(batch)
        self._waited_seconds += sum(self._clock() - session.first.arrived_at for session in batch)
        chunks = [session.chunk for session in batch if session.chunk is not None]
        worker.render(batch, partial(self._engine.render, chunks, worker.number))

    # --- replies ---

    def _cancelled(self, session: Session) -> bool:
        """Return whether the client has gone; its stream is then freed.

        The check is a call to tritonserver, a millisecond under load while the GPU waits, so it is made only where it
        can save much work.
        """
        queued = session.first
        waited = self._clock() - queued.arrived_at
        if not ((queued.request.whole or waited > CANCEL_CHECK_SECONDS) and queued.client_has_gone()):
            return False
        self._fail(session, asyncio.CancelledError())
        return True

    def _check_client(self, queued: QueuedRequest) -> None:
        """Raise CancelledError if the client has gone, between the steps of a whole utterance, which may take a minute
        on a CPU. Triton is asked every CANCEL_CHECK_SECONDS: a GPU needs less for all the steps."""
        if (now := self._clock()) - self._client_checked_at < CANCEL_CHECK_SECONDS:
            return
        self._client_checked_at = now
        if queued.client_has_gone():
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
        self._replies.submit(self._sessions.answered(session).send, result)
