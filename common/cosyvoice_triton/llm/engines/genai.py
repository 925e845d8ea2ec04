"""The engine `onnxruntime_genai`: an LLM in onnxruntime-genai's format, run by onnxruntime on the CPU.

Only the format is onnxruntime-genai's: on a CPU its own engine batches only requests that start together and has no
seed per request. The exported graph supports continuous batching: its attention reads each row's length from the
attention mask, and writes keys in place if past and present share a buffer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from cosyvoice_triton import profiles
from cosyvoice_triton.config import TensorrtLLMConfig
from cosyvoice_triton.errors import is_fatal
from cosyvoice_triton.llm.checkpoint import MAX_CONTEXT
from cosyvoice_triton.llm.engines.interface import GenerationRequest, candidate_ids, require_speech_tokens
from cosyvoice_triton.llm.engines.threaded_engine import Generation, OnTokens, ThreadedEngine
from cosyvoice_triton.llm.interface import FinishReason, TokenChunk
from cosyvoice_triton.llm.sampler import RequestSampler
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.profiles import LLMNumbers


@dataclass(eq=False, kw_only=True)
class RowGeneration(Generation):
    """A request that is computed in a row of the model's cache. slot: of the sampler."""

    slot: int = -1
    generated: int = 0
    length: int = 0  # tokens in its row of the cache
    last_token: int = -1


class BatchingEngine(ThreadedEngine[RowGeneration]):
    """Requests in the rows of one model's cache: a request's index in the list of rows is its row."""

    def __init__(self, model: Any, bias: np.ndarray, max_requests: int, numbers: LLMNumbers) -> None:
        """Make the engine. model: as `genai.GenAIModel`. bias (vocabulary,): added to the logits; minus infinity for
        ids that are never sampled."""
        self._model = model
        self._sampler = RequestSampler(torch.from_numpy(bias), max_requests)
        begin = self._sampler.first - int(model.logit_ids[0])
        self._columns = slice(begin, begin + self._sampler.width)  # of the logits
        self._free_slots = list(range(max_requests))
        super().__init__(max_requests, [], numbers)

    def _accept(self, request: GenerationRequest, on_tokens: OnTokens) -> RowGeneration:
        request.check(self._model.vocab_size, self._model.context)
        return RowGeneration(request, on_tokens)

    def step(self) -> float:
        self._prefill_one()
        self._wake_readers()  # the first token does not wait for the others' next ones
        self._decode_all()
        return 0.0

    def _prefill_one(self) -> None:
        """Prefill the oldest waiting request. One per step, so that many arrivals do not stall running streams."""
        with self._wake:
            while self._waiting and self._waiting[0].cancelled:
                self._waiting.popleft()
            # A cancelled request may occupy a row until the next decoding step.
            if not self._waiting or len(self._rows) == self._max_requests:
                return
            generation = self._waiting.popleft()
            self._rows.append(generation)
        generation.slot = self._free_slots.pop()
        self._sampler.start(generation.slot, generation.request)
        input_ids = generation.request.input_ids
        row = len(self._rows) - 1
        try:
            logits = self._model.prefill(row, input_ids)
        except Exception as error:
            if is_fatal(error):
                raise
            self._drop(row, error)
            return
        generation.length = len(input_ids)
        self._advance([row], logits[None])

    def _decode_all(self) -> None:
        for row in reversed(range(len(self._rows))):
            if self._rows[row].cancelled:
                self._release(row)
        if not self._rows:
            return
        for generation in self._rows:
            generation.length += 1
        tokens = np.array([generation.last_token for generation in self._rows])
        lengths = np.array([generation.length for generation in self._rows])
        logits = self._model.decode(tokens, lengths)  # (B, V)
        if faults.take("llm_thread"):
            raise SystemExit("a fault of a test")  # no Exception: the thread must not end in silence
        if faults.take("nan_logits"):
            logits[0] = np.nan
        self._advance(range(len(self._rows)), logits)

    def _advance(self, rows: Sequence[int], logits: np.ndarray) -> None:
        """Sample the next token of these rows, from logits (R, V), and report it."""
        scores = logits[:, self._columns]
        finite = np.isfinite(scores.max(1))  # NaN, too
        tokens = self._sampler.sample([self._rows[row].slot for row in rows], scores)
        # From the last row down: a release moves the last row into the gap, and that row has been advanced already.
        for row, token, good in reversed(list(zip(rows, tokens, finite, strict=True))):
            if good:
                self._report(row, token)
            else:
                self._drop(row, FloatingPointError("the LLM's logits are not finite"))

    def _report(self, row: int, token: int) -> None:
        """Report a row's next token; free the row if its request has finished."""
        generation = self._rows[row]
        request = generation.request
        generation.last_token = token
        generation.generated += 1
        finish: FinishReason | None = None
        if token in request.end_ids:
            finish = "stop"
        elif generation.generated == request.sampling.max_tokens:
            finish = "length"
        if finish or generation.cancelled:
            self._release(row)  # before the end is reported: the caller may submit the next request at once
        generation.report(TokenChunk([token], finish))

    def _release(self, row: int) -> None:
        """Free a row: the only place where a request leaves the batch. The last row moves into the gap."""
        last = len(self._rows) - 1
        if row != last:
            self._model.move(last, row, self._rows[last].length)
        self._free_slots.append(self._rows[row].slot)
        with self._wake:
            self._rows[row] = self._rows[last]
            self._rows.pop()

    def _drop(self, row: int, error: Exception) -> None:
        """End a request that cannot go on; the others are not affected."""
        generation = self._rows[row]
        self._release(row)
        generation.report(error)
        generation.cancel()


class GenAIModel:
    """One decoder with `rows` independent sequences in its cache. One thread owns it.

    context: maximum number of tokens in one sequence. vocab_size: number of input ids. logit_ids (V,): the id of each
    logit; they are consecutive.
    """

    def __init__(self, model_dir: str | Path, rows: int, *, threads: int = 0) -> None:
        """Load `model_dir`. `threads`: 0 for onnxruntime's default. ValueError if the directory is not valid."""
        config = _read_config(Path(model_dir))
        decoder = config["decoder"]
        self.context = min(config["context_length"], MAX_CONTEXT)
        self.vocab_size: int = config["vocab_size"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Spinning worker threads would take the cores from token2wav between two steps.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = Path(model_dir) / decoder["filename"]
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # Our conversion keeps only the speech logits of the last position, the plain builder all logits of all.
        first = config.get("first_logit_id", 0)
        positions, width = self._session.get_outputs()[0].shape[1:]
        self._last_logits_only = positions == 1
        self.logit_ids = np.arange(first, first + width)
        shape = (rows, decoder["num_key_value_heads"], self.context, decoder["head_size"])
        names = decoder["inputs"]["past_key_names"], decoder["inputs"]["past_value_names"]
        present = decoder["outputs"]["present_key_names"], decoder["outputs"]["present_value_names"]
        # Zeroed pages are not resident until they are written, so unused rows and positions use no memory.
        self._caches = [
            (past % layer, new % layer, np.zeros(shape, np.float32))  # (rows, heads, context, head_size)
            for layer in range(decoder["num_hidden_layers"])
            for past, new in zip(names, present, strict=True)
        ]
        if not np.isfinite(self.prefill(0, np.zeros(1, np.int64)).max()):  # NaN, too
            raise ValueError(f"{path}: its logits are not finite")

    def prefill(self, row: int, input_ids: np.ndarray) -> np.ndarray:
        """Start a sequence in `row` with ids (S,). Returns the logits (V,) after its last token."""
        return self._run(slice(row, row + 1), input_ids[None], np.array([len(input_ids)]))[0]

    def decode(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Append tokens (B,) to the first B rows, which then have `lengths` (B,) tokens. Returns logits (B, V)."""
        return self._run(slice(0, len(tokens)), tokens[:, None], lengths)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the `length` tokens of row `source` into row `target`."""
        for _, _, cache in self._caches:
            cache[target, :, :length] = cache[source, :, :length]

    def _run(self, rows: slice, input_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the logits (B, V) of the last position, for ids (B, S) and the rows' lengths (B,) with them."""
        B, S = input_ids.shape
        mask = np.arange(lengths.max()) < lengths[:, None]  # (B, longest): a row's sum is its length
        logits = np.empty((B, 1 if self._last_logits_only else S, len(self.logit_ids)), np.float32)
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(input_ids, np.int64))
        binding.bind_cpu_input("attention_mask", mask.astype(np.int64))
        for past, present, cache in self._caches:
            view = cache[rows]
            binding.bind_input(past, "cpu", 0, np.float32, view.shape, view.ctypes.data)
            binding.bind_output(present, "cpu", 0, np.float32, view.shape, view.ctypes.data)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits[:, -1]


def load_engine(config: TensorrtLLMConfig, tokenizer: LLMTokenizer) -> BatchingEngine:
    """Serve `engine_dir` on the CPU.

    Raises ValueError if it was not converted, or lacks the speech tokens of `tokenizer`.
    """
    model_dir = config.engine_dir
    model = GenAIModel(model_dir, rows=config.max_requests)
    require_speech_tokens(tokenizer, model.vocab_size, model_dir)
    if absent := set(candidate_ids(tokenizer).tolist()) - set(model.logit_ids.tolist()):
        raise ValueError(
            f"{model_dir} has no logit for the token {min(absent)}: it was converted with a different tokenizer"
        )
    bias = np.full(model.vocab_size, -np.inf, np.float32)
    bias[candidate_ids(tokenizer)] = 0  # the conversion has added the head's own bias
    engine = BatchingEngine(model, bias, config.max_requests, profiles.CPU.llm)
    engine.start()
    return engine


def _read_config(model_dir: Path) -> dict:
    path = model_dir / "genai_config.json"
    if not path.is_file():
        raise ValueError(f"no file {path}: convert the HuggingFace directory as docs/llm.md describes")
    config = json.loads(path.read_text())["model"]
    if "decoder" not in config or "past_key_names" not in config["decoder"].get("inputs", {}):
        raise ValueError(
            f"{path} does not describe a decoder with a key/value cache (model type {config.get('type')!r})"
        )
    return config
