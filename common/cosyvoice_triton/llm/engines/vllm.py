"""The engine `vllm`: vLLM's AsyncLLM over a HuggingFace directory, on a GPU.

vLLM is not a dependency of this project.
"""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from cosyvoice_triton.config import TensorrtLLMConfig
from cosyvoice_triton.errors import FatalError, UnavailableError
from cosyvoice_triton.llm.checkpoint import LLMLimits, read_limits
from cosyvoice_triton.llm.engines.interface import GenerationRequest, finish_reason, require_speech_tokens
from cosyvoice_triton.llm.interface import TokenChunk
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

# CUDA graphs of whole steps for all batch sizes: with the defaults, the time to a stream's first tokens doubles under
# mixed load.
GRAPHS = {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
LOGITS_PROCESSOR = "cosyvoice_triton.llm.vllm_logits:SpeechLogits"  # by name: vLLM imports it in another process


class VLLMEngine:
    """Up to `max_requests` live requests; vLLM batches, samples and aborts them."""

    def __init__(self, llm: AsyncLLM, limits: LLMLimits, max_requests: int) -> None:
        self.live = 0
        self._llm = llm
        self._limits = limits
        self._max_requests = max_requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        request.check(*self._limits)
        parameters = sampling_params(request)
        if self.live >= self._max_requests:
            raise UnavailableError(f"the LLM already serves its maximum of {self._max_requests} requests")
        self.live += 1
        prompt = TokensPrompt(prompt_token_ids=request.input_ids.tolist())
        try:
            # Closing vLLM's generator before its end aborts the request.
            async with aclosing(self._llm.generate(prompt, parameters, uuid.uuid4().hex)) as outputs:
                async for output in outputs:
                    (completion,) = output.outputs
                    yield TokenChunk(list(completion.token_ids), finish_reason(completion.finish_reason))
        except EngineDeadError as error:
            raise FatalError(f"the LLM engine is dead: {error}") from error
        except EngineGenerateError as error:
            raise UnavailableError(f"the LLM engine failed: {error}") from error
        finally:
            self.live -= 1

    def close(self) -> None:
        self._llm.shutdown()


def load_engine(config: TensorrtLLMConfig, tokenizer: LLMTokenizer) -> VLLMEngine:
    """Serve `engine_dir` in `memory_gib`. Raises ValueError if it lacks the speech tokens of `tokenizer`."""
    limits = read_limits(config.engine_dir)
    require_speech_tokens(tokenizer, limits.vocab_size, config.engine_dir)
    arguments = AsyncEngineArgs(
        model=config.engine_dir,
        skip_tokenizer_init=True,  # ids in, ids out
        generation_config="vllm",  # the directory's own config would change values that a request leaves unset
        max_model_len=limits.context,
        max_num_seqs=config.max_requests,
        gpu_memory_utilization=min(config.memory_gib * 2**30 / current_platform.get_device_total_memory(), 0.95),
        compilation_config=GRAPHS,
        logits_processors=[LOGITS_PROCESSOR],
        disable_log_stats=True,
    )
    return VLLMEngine(AsyncLLM.from_engine_args(arguments), limits, config.max_requests)


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """Return a request's sampling as vLLM's `SamplingParams`; `SpeechLogits` does the sampling."""
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(request.end_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"ras_window": sampling.ras_window, "ras_tau": sampling.ras_tau},
    )
