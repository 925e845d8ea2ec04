"""Speech tokens to audio: chunks of many streams in one batch, or a whole utterance.

The engine owns the networks and the prompt caches of voices. The caller owns each `Stream`: it opens it, makes its
chunks and closes it.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.batches import isolated
from cosyvoice_triton.config import FlowRuntime, KvCacheDtype, Token2WavConfig
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, MEL_BINS, TOKEN_MEL_RATIO
from cosyvoice_triton.device import launched, new_stream, use
from cosyvoice_triton.errors import is_fatal
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.monitoring.logs import timed
from cosyvoice_triton.monitoring.metrics import EVICTED, FAILED, FALLBACKS, RETRIED, Values
from cosyvoice_triton.networks.flow.config import euler_steps
from cosyvoice_triton.profiles import choose
from cosyvoice_triton.runtimes.loading import flow_runtime
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.flow.base import FlowOptions, StreamingFlow
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.memory import UNPLANNED_VOICES, MemoryPlan, Reading, planned
from cosyvoice_triton.token2wav.gpu.precision import Precision, kept_notes
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.stream import Chunk, MelStretch, NotFiniteError, Stream, without_click
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, VocoderOptions
from cosyvoice_triton.token2wav.vocoder.speed import begin_vocoding
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)

SILENT_MEL = -11.5  # log of the smallest magnitude in a mel


@dataclass(frozen=True)
class Renderer:
    """What one worker of the engine renders with: a flow and a vocoder with their CUDA graphs, and a CUDA stream. One
    thread uses it at a time."""

    flow: StreamingFlow
    vocoder: BatchVocoder
    stream: torch.cuda.Stream | None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def used(self, *, wait: bool = True) -> Iterator[None]:
        """Let the body compute on the CUDA stream. wait: what it has begun there is done at the end, and in any case
        after an error, so that threads and workers need no other order between them."""
        with self.lock, torch.inference_mode(), torch.cuda.stream(self.stream):
            try:
                yield
            except BaseException:
                wait = True
                raise
            finally:
                if wait:
                    launched(self.stream)()


class Token2Wav:
    """A flow and a vocoder.

    It may be used by threads of each of the `workers`, which render batches, and with CHUNK_WORKER also whole
    utterances, and by one more thread for everything else. That one may `prefill`, or `open` a stream in a voice
    without a prompt cache, only while the worker of first chunks, or the only one, renders nothing.
    """

    def __init__(
        self,
        flow: StreamingFlow,
        vocoder: BatchVocoder,
        device: torch.device | str = "cpu",
        *,
        files: tuple[str | Path, str | Path] = ("flow.pt", "hift.pt"),
        fallbacks: int = 0,
    ):
        """Make the engine. files: of the networks. fallbacks: how many networks are in a wider format than asked."""
        self._flow = flow
        self._vocoder = vocoder
        self._device = device
        self._renderers = [Renderer(flow, vocoder, self._new_stream())]
        for worker in range(1, flow.limits.workers):
            of_worker = flow.for_worker(worker)
            vocoder_of_worker = vocoder.for_worker(worker) if of_worker is not None else None
            if of_worker is None or vocoder_of_worker is None:
                break
            stream = self._new_stream(urgent=worker == FIRST_CHUNK_WORKER)
            self._renderers.append(Renderer(of_worker, vocoder_of_worker, stream))
        # With the worker of first chunks, or the only one: the last.
        self._opening = replace(self._renderers[-1], stream=self._new_stream(urgent=True), lock=threading.Lock())
        self._lock = threading.Lock()  # of the prompt caches, the slots of streams, and the counts
        self._files = files
        self._fallbacks = fallbacks
        self._bad_chunk: Chunk | None = None
        self._retried = self._failed = 0

    @classmethod
    def load(
        cls,
        stack: Stack,
        model_dir: str | Path,
        *,
        device: str,
        limits: BatchLimits,
        precision: Precision,
        runtime: FlowRuntime = "auto",
        steps: int | None = None,
        kv_cache_dtype: KvCacheDtype = "auto",
        plan: Callable[[Precision], MemoryPlan | int] = lambda _: UNPLANNED_VOICES,
        read: Callable[[str], Reading] = Reading.of,
        notes: Path | None = None,
    ) -> "Token2Wav":
        """Load the networks of a stack from its checkpoint directory, and the runtime's own files.

        steps: of the Euler solve; None: the checkpoint's. kv_cache_dtype: see `Token2WavConfig`.
        runtime: of the flow's estimator. "torch" on a GPU captures no CUDA graphs: start-up is fast and most of the
        memory stays free, which suits whole utterances. plan: returns the bytes for prompt caches or, on a GPU, a plan
            that has the limits, too, and the rest of the memory for prompt caches, as `read` measures it after loading.
        notes: see `Precision.checked`.
        ValueError for a checkpoint that does not fit, see also `Precision.checked`.
        """
        use(device)
        steps = euler_steps(Path(model_dir) / stack.flow, steps)
        runtime, asked = flow_runtime(runtime, device), precision
        with timed("precision"):
            precision = precision.checked(stack, model_dir, device, limits=limits, steps=steps, notes=notes)
        memory = plan(precision)
        if isinstance(memory, MemoryPlan):
            limits = memory.limits
        options = FlowOptions(
            stack=stack,
            device=device,
            dtype=precision.flow,
            runtime=runtime,
            steps=steps,
            limits=limits,
            prompt_cache_bytes=memory if isinstance(memory, int) else 0,
            kv_cache_dtype=kv_cache_dtype,
        )
        files = Path(model_dir) / stack.flow, Path(model_dir) / stack.hift
        with timed("flow"):
            flow: StreamingFlow = resolve_name(stack.loader)(files[0], options)
        if flow.cumulative != stack.cumulative:
            raise ValueError(f"stack {stack.name!r} has cumulative {stack.cumulative}, its flow {flow.cumulative}")
        of_vocoder = VocoderOptions(device=device, dtype=precision.vocoder, limits=limits, graphs=options.graphs)
        with timed("vocoder"):
            vocoder: BatchVocoder = resolve_name(stack.vocoder_loader)(files[1], of_vocoder)
        fallbacks = (asked.flow != precision.flow) + (asked.vocoder != precision.vocoder)
        with timed("other workers"):
            engine = cls(flow, vocoder, device, files=files, fallbacks=fallbacks)
        if isinstance(memory, MemoryPlan):
            flow.reserve_prompts(memory.voices(read(device)))
        return engine

    @classmethod
    def from_config(cls, stack: Stack, config: Token2WavConfig) -> "Token2Wav":
        """Load the networks as the Triton model is configured."""
        if torch.device(config.device).type == "cuda":
            # The host computes little, and an operation on all of its cores would wait for those that are busy.
            torch.set_num_threads(1)
        limits = BatchLimits(
            max_streams=config.max_streams,
            first_hop_tokens=config.first_hop_tokens,
            max_hop_tokens=config.max_hop_tokens,
            chunk_boundary=stack.chunk_boundary,
            profile=choose(config.profile, config.device),
        )
        formats = config.flow_precision, config.vocoder_precision
        return cls.load(
            stack,
            config.model_dir,
            device=config.device,
            limits=limits,
            precision=Precision.named(*formats, config.device, config.flow_runtime),
            runtime=config.flow_runtime,
            steps=config.n_timesteps,
            notes=kept_notes(),
            kv_cache_dtype=config.kv_cache_dtype,
            plan=lambda precision: planned(stack, config, limits, precision.flow.itemsize, precision.vocoder.itemsize),
        )

    def _new_stream(self, urgent: bool = False) -> torch.cuda.Stream | None:
        device = torch.device(self._device)
        return new_stream(device, urgent) if device.type == "cuda" else None

    @property
    def workers(self) -> int:
        """Return how many batches can be rendered at once. If two, FIRST_CHUNK_WORKER renders first chunks only."""
        return len(self._renderers)

    def warm_up(self, worker: int = 0) -> None:
        """Render a dummy utterance: initialises what is set up at first use and finds a checkpoint that cannot run.
        ValueError with the file whose network speaks no numbers. To be called in the thread of the worker."""
        use(self._device)
        prompt, tokens = self.sample(self.limits.first_hop_tokens + LOOKAHEAD_TOKENS)
        try:
            stream = self.open(prompt)
            self.step([self.chunk(stream, tokens, final=False)], worker)
            self.close(stream)
            if worker == 0:
                self.whole(prompt, tokens)
        except NotFiniteError as error:
            with torch.inference_mode():
                (mel,) = self._flow.exact().whole([(prompt, tokens)])
            raise ValueError(f"checkpoint {self._files[bool(mel.isfinite().all())]}: {error}") from error

    def sample(self, tokens: int = LOOKAHEAD_TOKENS) -> tuple[Prompt, np.ndarray]:
        """Return a silent voice of that many tokens, and as many tokens to speak."""
        ids = np.arange(tokens)
        mel = np.full((TOKEN_MEL_RATIO * tokens, MEL_BINS), SILENT_MEL, np.float32)
        return Prompt(ids, mel, np.ones(self._flow.speaker_dim, np.float32), text=""), ids

    def prefill_frames(self, prompt: Prompt) -> int:
        """Return how many mel frames are prefilled to open a stream in that voice: 0 if its prompt cache is there.
        ValueError for an invalid prompt."""
        self._check(prompt)
        with self._lock:
            return self._flow.prefill_frames(prompt)

    def fitting(self, prompts: Sequence[Prompt]) -> list[bool]:
        """Say which streams could be opened now, as `StreamingFlow.fitting` does: streams of the other voices wait
        until some end."""
        with self._lock:
            return self._flow.fitting(prompts)

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Build the prompt caches of different voices in one batch, if there is room for all."""
        with self._lock, self._opening.used():
            self._opening.flow.prefill(prompts)

    def open(self, prompt: Prompt, speed: float = 1.0) -> Stream:
        """Start a stream in a voice, at a speed as of `whole`; builds the voice's prompt cache if it is not there."""
        self._check(prompt)
        with self._lock, self._opening.used():
            vocoder = self._vocoder.open()
            try:
                stream = self._opening.flow.open(prompt, vocoder)
            except BaseException as error:
                self._vocoder.close(vocoder)
                self._retried += isinstance(error, NotFiniteError)  # a voice that leaves the range of its format
                raise
            stream.stretch = MelStretch(speed) if speed != 1.0 else None
            return stream

    def chunk(self, stream: Stream, tokens: np.ndarray, *, final: bool, offset: int | None = None) -> Chunk:
        """Return the next chunk of a stream, or a ValueError: see `StreamingFlow.chunk`."""
        return self._flow.chunk(stream, tokens, final=final, offset=offset)

    def is_first_chunk(self, chunk: Chunk) -> bool:
        """Return whether FIRST_CHUNK_WORKER renders it: a first chunk, of no more audio than those of the first hop."""
        slow = chunk.stream.stretch is not None and chunk.stream.stretch.speed < 1
        return chunk.offset == 0 and chunk.new <= self.limits.first_chunk_tokens and not slow

    @property
    def limits(self) -> BatchLimits:
        return self._flow.limits

    @property
    def batch_tokens(self) -> int:
        """Return how many tokens a batch should have at most, counted as `Chunk.computed`."""
        return self._flow.batch_tokens

    def padded(self, chunks: int, tokens: int, worker: int = 0) -> int:
        """See `limits.padding`."""
        return self._renderers[worker].flow.padded(chunks, tokens)

    @property
    def cache_bytes(self) -> int:
        """Return the memory in bytes of the streams and of the prompt caches."""
        return self._flow.cache_bytes + self._vocoder.nbytes

    @property
    def counts(self) -> Values:
        """Return what went wrong since the start, as metrics."""
        counted = {RETRIED: self._retried, FAILED: self._failed, FALLBACKS: self._fallbacks}
        return {**counted, EVICTED: self._flow.evicted}

    def close(self, stream: Stream) -> None:
        """Free what the stream holds. To be called once, and not while a chunk of it is rendered."""
        with self._lock:
            self._flow.close(stream)
            self._vocoder.close(stream.vocoder)

    def step(self, chunks: Sequence[Chunk], worker: int = 0) -> list[np.ndarray]:
        """Return the audio that each chunk adds to its stream, float32 (N,) at 24 kHz; empty while it is withheld.

        The chunks are of different streams; batching changes the audio of each by rounding only (docs/gpu.md,
        Precision).
        """
        audio = []
        for result in self.render(chunks, worker):
            if isinstance(result, Exception):
                raise result
            audio.append(result)
        return audio

    def render(
        self, chunks: Sequence[Chunk], worker: int = 0, on_solved: Callable[[], object] = lambda: None
    ) -> list[np.ndarray | Exception]:
        """Render chunks as `step` does, but a chunk that cannot be rendered gets an exception, and its stream cannot go
        on; the others get their audio. A batch for which the memory is not enough is rendered in parts. A chunk whose
        audio is not finite is rendered again in float32. FIRST_CHUNK_WORKER renders only what `is_first_chunk` says.

        on_solved: called when the mels are made, and only their vocoding is left: another thread may then let the
        worker render chunks of other streams. On a GPU these are prepared meanwhile and follow without a gap.
        """
        renderer = self._renderers[worker]
        with renderer.used(wait=False):
            solved, finish = self._begun(renderer, chunks)
            done = launched(renderer.stream)
        solved()
        on_solved()
        done()
        results = finish()
        for index, result in enumerate(results):
            if isinstance(result, NotFiniteError):
                with renderer.used(), self._lock:
                    results[index] = self._again(chunks[index], result)
        audio: list[np.ndarray | Exception] = []
        for chunk, result in zip(chunks, results, strict=True):
            if isinstance(result, Exception):
                with self._lock:
                    self._failed += 1
                audio.append(result)
                continue
            audio.append(result.numpy() if chunk.stream.begun else without_click(result.numpy()))
            chunk.stream.begun |= len(result) > 0
        return audio

    def _begun(
        self, renderer: Renderer, chunks: Sequence[Chunk]
    ) -> tuple[Callable[[], object], Callable[[], list[Tensor | Exception]]]:
        """Begin to render chunks: return what waits for the mels, and what waits for the audio and returns it."""

        def flow(part: Sequence[Chunk]) -> list[Tensor]:
            self._fail_if_asked(part)
            mels = renderer.flow.render(part)
            return mels if len(part) == len(chunks) else [mel.clone() for mel in mels]  # the next part overwrites them

        results: list[Tensor | Exception] = [*isolated(flow, chunks)]
        mels = {index: mel for index, mel in enumerate(results) if isinstance(mel, Tensor)}
        if mels and faults.take("nan_mel"):
            next(iter(mels.values())).fill_(torch.nan)
        solved = launched(renderer.stream)
        vocoded = begin_vocoding(renderer.vocoder, [chunks[index] for index in mels], list(mels.values()))

        def finish() -> list[Tensor | Exception]:
            for index, speech in zip(mels, vocoded(), strict=True):
                results[index] = speech
            return results

        return solved, finish

    def _again(self, chunk: Chunk, reason: NotFiniteError) -> Tensor | Exception:
        """Render the audio (N,) of a chunk in float32. Other streams of its worker and new ones wait meanwhile."""
        logger.warning("%s: a chunk is rendered again in float32", reason)
        self._retried += 1
        try:
            (audio,) = begin_vocoding(self._vocoder.exact(), [chunk], [self._flow.again(chunk)])()
        except Exception as error:
            if is_fatal(error):
                raise
            return error
        return audio

    def _fail_if_asked(self, chunks: Sequence[Chunk]) -> None:
        """Cause the faults that tests ask for."""
        if faults.take("gpu_error"):
            raise RuntimeError(faults.GPU_ERROR)
        if len(chunks) > 1 and faults.take("out_of_memory"):
            raise MemoryError("out of memory")
        if faults.take("bad_chunk"):
            self._bad_chunk = chunks[0]
        if self._bad_chunk in chunks:
            raise RuntimeError("a bad chunk")

    def whole(
        self, prompt: Prompt, tokens: np.ndarray, speed: float = 1.0, before_step: Callable[[], object] = lambda: None
    ) -> np.ndarray:
        """Render a whole utterance at once (full attention, no chunks) -> float32 (N,) at 24 kHz.

        speed: its mel is stretched to 1 / speed of its length, as CosyVoice2 does, which keeps the pitch. before_step:
        called before each step of the solve, which on a CPU may take a minute in all; its exception ends it.
        """
        (audio,) = self.whole_batch([(prompt, tokens)], speed, before_step)
        return audio

    def whole_mels(self, utterances: Sequence[tuple[Prompt, np.ndarray]]) -> list[torch.Tensor]:
        """Return the mels (80, 2N) of which `whole_batch` makes the audio of utterances of N tokens each."""
        return self._flow.whole(utterances)

    def whole_batch(
        self,
        utterances: Sequence[tuple[Prompt, np.ndarray]],
        speed: float = 1.0,
        before_step: Callable[[], object] = lambda: None,
    ) -> list[np.ndarray]:
        """Render whole utterances in one batch, each as `whole` does alone. ValueError if one of them is invalid."""
        for prompt, tokens in utterances:
            self._check(prompt)
            self._flow.check_ids(tokens)
            if len(tokens) == 0:
                raise ValueError("target_speech_tokens is empty: there is nothing to speak")

        def rendered(flow: StreamingFlow, vocoder: BatchVocoder) -> list[Tensor]:
            mels = flow.whole(utterances, before_step)
            before_step()
            if speed != 1.0:
                mels = [F.interpolate(x[None], size=max(1, int(x.shape[1] / speed)), mode="linear")[0] for x in mels]
            return vocoder.whole(mels)

        with self._renderers[0].used():
            audio = rendered(self._flow, self._vocoder)
            if not all(row.isfinite().all() for row in audio):
                logger.warning("the audio is not finite: whole utterances are rendered again in float32")
                with self._lock:
                    self._retried += len(utterances)
                    audio = rendered(self._flow.exact(), self._vocoder.exact())
        if not all(row.isfinite().all() for row in audio):
            self._failed += len(utterances)
            raise NotFiniteError("the audio is not finite")
        return [without_click(row.numpy()) for row in audio]

    def _check(self, prompt: Prompt) -> None:
        self._flow.check_ids(prompt.tokens)
        if 0 < len(prompt.tokens) < LOOKAHEAD_TOKENS:
            found = f"the prompt has {len(prompt.tokens)} speech tokens"
            raise ValueError(f"{found}; it needs {LOOKAHEAD_TOKENS} or more, or none")
