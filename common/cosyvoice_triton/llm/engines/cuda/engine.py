"""The engine `cuda`: a thread that prefills prompts, launches decode steps and reports their tokens."""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from cosyvoice_triton import profiles
from cosyvoice_triton.config import TensorrtLLMConfig, device_of
from cosyvoice_triton.device import use
from cosyvoice_triton.llm.checkpoint import LLMLimits
from cosyvoice_triton.llm.engines.cuda.decoder import Decoder
from cosyvoice_triton.llm.engines.cuda.operations import PAGE, Plain
from cosyvoice_triton.llm.engines.cuda.scheduler import LaunchedBatch, PagePool, Scheduler, TokenSequence
from cosyvoice_triton.llm.engines.cuda.weights import Weights
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.engines.threaded_engine import OnTokens, ThreadedEngine
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.profiles import LLMNumbers

logger = logging.getLogger(__name__)

GIB = 1 << 30
PROCESS_GIB = 1.0  # of a GPU's memory beside weights and pages: CUDA's context, graphs and temporary tensors


class CudaEngine(ThreadedEngine[TokenSequence]):
    """Serves up to `max_requests` live requests with one decoder; those for which there are no pages wait.

    hold_submissions: whoever submits a request waits while work is launched on a GPU, a millisecond or two. Otherwise
    the two threads would take CPython's lock from each other at each operation of torch. On a CPU a launch is the
    computation itself, and takes longer.
    """

    def __init__(
        self,
        decoder: Decoder,
        limits: LLMLimits,
        pages: PagePool,
        max_requests: int,
        numbers: LLMNumbers,
        *,
        hold_submissions: bool,
        prepare: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._decoder = decoder
        self._limits = limits
        self._pages = pages
        self._clock = clock
        self._hold_submissions = hold_submissions
        self._scheduler = Scheduler(decoder, max_requests, pages, numbers)
        self._next_paced_step = 0.0
        super().__init__(max_requests, self._scheduler.live, numbers, prepare=prepare, sleep=sleep)

    def _accept(self, request: GenerationRequest, on_tokens: OnTokens) -> TokenSequence:
        request.check(*self._limits)
        needed = self._scheduler.pages_of(request)
        if needed > self._pages.total:
            raise ValueError(
                f"{len(request.input_ids)} prompt tokens and {request.sampling.max_tokens} new ones exceed the LLM's "
                f"memory for {self._pages.total * PAGE}"
            )
        return TokenSequence(request, on_tokens, numbers=self._numbers)

    def step(self) -> float:
        if faults.take("llm_thread"):
            raise SystemExit("a fault of a test")  # no Exception: the thread must not end in silence
        ended = self._prefill()
        speaking = next((each for each in self._rows if each.generated), None)
        if speaking and faults.take("nan_logits"):
            self._decoder.invalidate(speaking.pages[0])
        with self._launching():
            before = self._scheduler.launch(paced=self._paced_step_is_due())
        ended = self._answer(before) or ended
        pages_wanted = ended and self._waiting
        if not self._rows or not self._scheduler.idle or pages_wanted:
            return 0.0
        return self._next_paced_step - self._clock()  # meanwhile the GPU is token2wav's

    def _launching(self) -> AbstractContextManager[object]:
        return self._submission if self._hold_submissions else nullcontext()

    def _prefill(self) -> bool:
        """Launch the prompts that wait. Returns whether a request has ended meanwhile.

        One prefill is launched while the device computes the one before, so that each has all requests that have come
        until then.
        """
        tokens, ended = 0, False
        while tokens < self._numbers.prefill_tokens_per_step:
            with self._launching():
                with self._wake:
                    self._newcomers = False
                    self._scheduler.admit(self._waiting)
                if not (launched := self._scheduler.prefill()):
                    break
                before = self._scheduler.take_launched()
            tokens += launched + self._numbers.prefill_launch_tokens
            ended = self._answer(before) or ended
            self._wake_readers()
            self._decoder.await_prefills()
        return ended

    def _answer(self, launched: list[LaunchedBatch]) -> bool:
        """Report what these steps have sampled. Returns whether a request has ended."""
        answers = self._scheduler.answers(launched)
        with self._wake:  # before the end is reported: the caller may submit the next request at once
            for answer in answers:
                if answer.ends:
                    self._scheduler.remove(answer.sequence)
        for answer in answers:
            answer.sequence.report(answer.item)
        return any(answer.ends for answer in answers)

    def _paced_step_is_due(self) -> bool:
        """Return whether the decode interval of the paced sequences is over; if so, the next one begins."""
        now, numbers = self._clock(), self._numbers
        if now < self._next_paced_step:
            return False
        crowd = len(self._rows) > numbers.crowd_rows
        interval = numbers.crowd_decode_interval_seconds if crowd else numbers.decode_interval_seconds
        # After a delay of less than an interval the next one comes earlier, so that the mean rate is kept.
        self._next_paced_step = max(self._next_paced_step, now - interval) + interval
        return True


def load_engine(config: TensorrtLLMConfig, tokenizer: LLMTokenizer) -> CudaEngine:
    """Serve `engine_dir` on that kind of device, in `memory_gib`.

    Raises ValueError if it lacks the speech tokens of `tokenizer`, or if the memory is too small for one request.
    """
    device = torch.device(device_of(config.instance_kind, config.llm_gpu))
    use(device)
    max_requests, gib = config.max_requests, config.memory_gib
    on_gpu = device.type == "cuda"
    numbers = profiles.choose(config.profile, str(device)).llm
    weights = Weights.read(config.engine_dir, tokenizer, device, _dtype(device))
    sizes = weights.sizes
    longest = -(-sizes.context // PAGE)
    page = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * PAGE * weights.embedding.element_size()
    rest = int(GIB * (gib - PROCESS_GIB * on_gpu)) - weights.nbytes
    count = min(rest // page, max_requests * longest + 1)
    if count <= longest:
        raise ValueError(
            f"llm_memory_gib {gib:g} is too small: the LLM needs "
            f"{gib + (page * (longest + 1) - rest) / GIB:.2f} for one request of {sizes.context} tokens"
        )
    decoder = Decoder(weights, _operations(device), max_requests, count, numbers.max_prefill_tokens, graphs=on_gpu)
    if on_gpu:
        sys.setswitchinterval(numbers.switch_seconds)
    logger.info("the LLM runs on %s with keys and values of %d tokens", device, (count - 1) * PAGE)
    limits = LLMLimits(sizes.vocab, sizes.context)
    pages, prepare = PagePool(count), partial(use, device)
    engine = CudaEngine(decoder, limits, pages, max_requests, numbers, hold_submissions=on_gpu, prepare=prepare)
    engine.start()
    return engine


def _dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _operations(device: torch.device) -> Plain:
    if device.type != "cuda":
        return Plain()
    from cosyvoice_triton.llm.engines.cuda.fused_operations import (
        Fused,  # needs the language Triton, which comes with CUDA builds of torch
    )

    return Fused(device)
