"""The engine `tensorrt_llm`: TensorRT-LLM's LLM API over a HuggingFace directory or built engines, on a GPU.

Experimental, not run: it was written for TensorRT-LLM 1.0 and newer, which is not a dependency of this project
(NVIDIA's images have it), and it is tested against a fake only. It is frozen: it gets no new features.
"""

import importlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import KvCacheConfig

from cosyvoice_triton.config import TensorrtLLMConfig
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.checkpoint import LLMLimits, read_limits, speech_bias
from cosyvoice_triton.llm.engines.interface import GenerationRequest, finish_reason, require_speech_tokens
from cosyvoice_triton.llm.interface import TokenChunk
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer


class TensorRTLLMEngine:
    """Up to `max_requests` live requests; TensorRT-LLM batches, samples and aborts them.

    bias (V,): added to the logits; minus infinity for all but speech and end tokens.
    """

    def __init__(self, llm: LLM, limits: LLMLimits, bias: torch.Tensor, max_requests: int) -> None:
        self.live = 0
        self._llm = llm
        self._limits = limits
        self._bias = bias
        self._max_requests = max_requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        request.check(*self._limits)
        parameters = sampling_params(request, self._bias)
        if self.live >= self._max_requests:
            raise UnavailableError(f"the LLM already serves its maximum of {self._max_requests} requests")
        self.live += 1
        answer, reason = None, None
        try:
            answer = self._llm.generate_async(request.input_ids.tolist(), parameters, streaming=True)
            async for output in answer:
                (completion,) = output.outputs
                reason = finish_reason(completion.finish_reason)
                yield TokenChunk(list(completion.token_ids_diff), reason)
        except RuntimeError as error:  # also its RequestError
            raise UnavailableError(f"the LLM engine failed: {error}") from error
        finally:
            self.live -= 1
            if answer is not None and reason is None:
                answer.abort()

    def close(self) -> None:
        self._llm.shutdown()


def load_engine(config: TensorrtLLMConfig, tokenizer: LLMTokenizer) -> TensorRTLLMEngine:
    """Serve `engine_dir`, with keys and values in `gpu_share` of the free memory.

    Raises ValueError if it lacks the speech tokens of `tokenizer`, or if this TensorRT-LLM cannot serve it.
    """
    model_dir = config.engine_dir
    built = (Path(model_dir) / "rank0.engine").is_file()
    limits = _built_limits(Path(model_dir)) if built else read_limits(model_dir)
    require_speech_tokens(tokenizer, limits.vocab_size, model_dir)
    options: dict[str, Any] = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,  # ids in, ids out
        "kv_cache_config": KvCacheConfig(free_gpu_memory_fraction=config.gpu_share),
    }
    if built:
        # From 1.0 on the backend for engines has to be asked for; in mid-2026 it was removed.
        backend: Any = importlib.import_module("tensorrt_llm._tensorrt_engine")
        llm = backend.LLM(**options)
    else:
        llm = LLM(max_batch_size=config.max_requests, max_seq_len=limits.context, **options)
    # A directory of built engines has no learned bias: there it only excludes text.
    bias = torch.from_numpy(speech_bias(model_dir, tokenizer, limits.vocab_size))
    return TensorRTLLMEngine(llm, limits, bias, config.max_requests)


def sampling_params(request: GenerationRequest, bias: torch.Tensor) -> SamplingParams:
    """Return a request's sampling as TensorRT-LLM's `SamplingParams`. ValueError for repetition-aware sampling."""
    sampling = request.sampling.seeded()
    if sampling.ras_window:
        raise ValueError(f"ras_window {sampling.ras_window}: TensorRT-LLM has no repetition-aware sampling")
    greedy = sampling.temperature == 0  # which TensorRT-LLM only supports as top_k 1
    return SamplingParams(
        temperature=1.0 if greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=1 if greedy else sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        end_id=request.end_ids[0],
        pad_id=request.end_ids[0],
        stop_token_ids=list(request.end_ids),
        embedding_bias=bias,
        detokenize=False,
    )


def _built_limits(engine_dir: Path) -> LLMLimits:
    config = json.loads((engine_dir / "config.json").read_text())
    return LLMLimits(config["pretrained_config"]["vocab_size"], config["build_config"]["max_seq_len"])
