"""Loads the decoder and serves requests with it in a thread."""

import logging
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from cosyvoice_triton.config import device_of
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.llm.engines.cuda.decoder import Decoder
from cosyvoice_triton.llm.engines.cuda.operations import PAGE, Operations, Plain
from cosyvoice_triton.llm.engines.cuda.pages import Pages
from cosyvoice_triton.llm.engines.cuda.scheduler import STEPS_PER_LOOK, Launched, Scheduler, SequenceRow
from cosyvoice_triton.llm.engines.cuda.weights import Qwen2Sizes, Weights
from cosyvoice_triton.llm.engines.interface import GenerationRequest, Resources
from cosyvoice_triton.llm.engines.threaded import OnTokens, ThreadedEngine
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring import faults

logger = logging.getLogger(__name__)

GIB = 1 << 30
MAX_PREFILL = {"cuda": 4096, "cpu": 256}  # tokens of prompts in one launch
# Tokens of prompts before a step: a step takes nearly as long for few requests as for many, so when many begin
# together, their prompts come first. A launch of few tokens takes as long as one of so many more.
PREFILL_PER_STEP = 16384
LAUNCH_TOKENS = 512
# Seconds until a thread that waits for CPython's lock may ask for it, in the LLM's process: a crowd's requests come in
# another thread than the engine's, which waits for it when the GPU has computed what was launched.
SWITCH_SECONDS = 3e-4
# Rows that are ahead of their listeners are computed together, at ten times the rate of speech: a step of many rows
# takes hardly longer than one of few, and between them the GPU is token2wav's, which renders first chunks.
BEAT_SECONDS = STEPS_PER_LOOK / (10 * TOKEN_RATE)
# With more than so many rows hundreds listen, and token2wav needs the GPU most: 6.7 times the rate of speech.
CROWD_ROWS = 40
CROWD_BEAT_SECONDS = 1.5 * BEAT_SECONDS
# Of a GPU's memory, beside weights and pages: CUDA's context, graphs and temporary tensors.
PROCESS_GIB = 1.0


class CudaEngine(ThreadedEngine[SequenceRow]):
    """Up to `max_requests` live requests; those for which there are no pages wait."""

    def __init__(
        self, decoder: Decoder, sizes: Qwen2Sizes, pages: Pages, max_requests: int, device: torch.device
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._sizes = sizes
        self._pages = pages
        self._scheduler = Scheduler(decoder, max_requests, pages)
        self._next_beat = 0.0
        self._last_waiting: SequenceRow | None = None  # of those for which there were no pages
        super().__init__(max_requests, self._scheduler.rows)

    def _serve(self) -> None:
        # On a CPU, more threads for such small products take more time, and the cores from token2wav.
        torch.set_num_threads(1)
        _use(self._device)
        super()._serve()

    def _accept(self, request: GenerationRequest, on_tokens: OnTokens) -> SequenceRow:
        request.check(self._sizes.vocab, self._sizes.context)
        needed = self._scheduler.pages_of(request)
        if needed > self._pages.total:
            raise ValueError(
                f"{len(request.input_ids)} prompt tokens and {request.sampling.max_tokens} new ones exceed the LLM's "
                f"memory for {self._pages.total * PAGE}"
            )
        return SequenceRow(request, on_tokens)

    def _step(self) -> None:
        if faults.take("llm_thread"):
            raise RuntimeError("a fault of a test")
        ended = self._prefill()
        speaking = next((row for row in self._rows if row.generated), None)
        if speaking and faults.take("nan_logits"):
            self._decoder.spoil(speaking.pages[0])
        with self._launching:
            before = self._scheduler.launch(ahead=self._beat())
        ended = self._answer(before) or ended
        pages_wanted = self._last_waiting is not None and ended
        if self._rows and self._scheduler.idle and not pages_wanted:
            self._rest(self._next_beat - time.monotonic())

    @property
    def _launching(self) -> AbstractContextManager[object]:
        """Held while work is launched. On a GPU whoever submits waits meanwhile, a millisecond or two: the two threads
        would take CPython's lock from each other at each operation of torch. On a CPU the work is computed in it."""
        return self._wake if self._device.type == "cuda" else nullcontext()

    def _prefill(self) -> bool:
        """Launch prompts, one launch while the device computes another, so that each has all requests that have come
        until then. Returns whether a request has ended meanwhile."""
        tokens, ended = 0, False
        while tokens < PREFILL_PER_STEP:
            with self._launching:
                with self._wake:
                    self._scheduler.admit(self._waiting)
                    self._last_waiting = self._waiting[-1] if self._waiting else None
                if not (launched := self._scheduler.prefill()):
                    break
                before = self._scheduler.take_launched()
            tokens += launched + LAUNCH_TOKENS
            ended = self._answer(before) or ended
            self._wake_readers()
            self._decoder.await_prefills()
        return ended

    def _answer(self, launched: list[Launched]) -> bool:
        """Report what these steps have drawn; returns whether a request has ended."""
        answers = self._scheduler.answers(launched)
        with self._wake:  # before the end is reported: the caller may submit the next request at once
            for answer in answers:
                if answer.ends:
                    self._scheduler.remove(answer.sequence)
        for answer in answers:
            answer.sequence.report(answer.item)
        return any(answer.ends for answer in answers)

    def _beat(self) -> bool:
        """Whether it is time for the rows that are ahead."""
        now = time.monotonic()
        if now < self._next_beat:
            return False
        beat = BEAT_SECONDS if len(self._rows) <= CROWD_ROWS else CROWD_BEAT_SECONDS
        self._next_beat = max(self._next_beat, now - beat) + beat
        return True

    def _rest(self, seconds: float) -> None:
        """Leave the GPU to token2wav, or until a further request comes."""
        self._wake_readers()
        with self._wake:
            self._wake.wait_for(
                lambda: self._failure or (self._waiting and self._waiting[-1] is not self._last_waiting),
                max(0.0, seconds),
            )


def load_engine(model_dir: str | Path, tokenizer: LLMTokenizer, max_requests: int, resources: Resources) -> CudaEngine:
    """Serve `model_dir` on that kind of device, in `resources.gib`.

    Raises ValueError if it lacks the speech tokens of `tokenizer`, or if the memory is too small for one request.
    """
    device = torch.device(device_of(resources.instance_kind, resources.gpu))
    _use(device)
    on_gpu = device.type == "cuda"
    weights = Weights.read(model_dir, tokenizer, device, _dtype(device))
    sizes = weights.sizes
    longest = -(-sizes.context // PAGE)
    page = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * PAGE * weights.embedding.element_size()
    rest = int(GIB * (resources.gib - PROCESS_GIB * on_gpu)) - weights.nbytes
    count = min(rest // page, max_requests * longest + 1)
    if count <= longest:
        raise ValueError(
            f"llm_memory_gib {resources.gib:g} is too small: the LLM needs "
            f"{resources.gib + (page * (longest + 1) - rest) / GIB:.2f} for one request of {sizes.context} tokens"
        )
    decoder = Decoder(weights, _operations(device), max_requests, count, MAX_PREFILL[device.type], graphs=on_gpu)
    if on_gpu:
        sys.setswitchinterval(SWITCH_SECONDS)
    logger.info("the LLM runs on %s with keys and values of %d tokens", device, (count - 1) * PAGE)
    return CudaEngine(decoder, sizes, Pages(count), max_requests, device)


def _use(device: torch.device) -> None:
    """Make a GPU the current one of this thread: kernels and graphs take no device argument."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _operations(device: torch.device) -> Operations:
    if device.type != "cuda":
        return Plain()
    from cosyvoice_triton.llm.engines.cuda.fused import (
        Fused,  # needs the language Triton, which comes with CUDA builds of torch
    )

    return Fused(device)
