"""What vLLM's sampler does not know of speech: which tokens there are, their bias, and repetition-aware sampling.

For the engine `vllm`, and for a server: `vllm serve ... --logits-processors common.llm.vllm_logits:SpeechLogits`. A
request asks for repetition-aware sampling by `ras_window` and `ras_tau` in its `extra_args` (`vllm_xargs` over HTTP).
"""

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from common.llm.checkpoint import speech_bias
from common.speech_tokens import LLMTokenizer


class SpeechLogits(AdapterLogitsProcessor):
    """Runs before penalties, temperature and truncation, after vLLM's own `min_tokens`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._device = device
        model = vllm_config.model_config
        bias = speech_bias(model.model, LLMTokenizer.from_dir(model.model), model.get_vocab_size())
        self._bias = torch.from_numpy(bias).to(device)

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) with text made impossible and, in the rows that ask for it, one token chosen."""
        return super().apply(logits.add_(self._bias))

    def new_req_logits_processor(self, params: SamplingParams) -> "RepetitionAware | None":
        extra = params.extra_args or {}
        if not int(extra.get("ras_window", 0)) or params.temperature == 0:
            return None
        return RepetitionAware(params, int(extra["ras_window"]), float(extra["ras_tau"]), self._device)


class RepetitionAware:
    """Chooses a request's next token as `sampler.TokenSampler` does with a `ras_window`, on the GPU without waiting.

    What it chooses keeps a finite logit, and nothing else does.
    """

    def __init__(self, params: SamplingParams, window: int, tau: float, device: torch.device) -> None:
        self._temperature = params.temperature
        self._top_p = params.top_p
        self._top_k = params.top_k
        self._window = window
        self._most = window * tau
        self._generator = None
        if params.seed is not None:
            self._generator = torch.Generator(device).manual_seed(params.seed)

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Ids so far and logits (V,) -> logits (V,) of which one is finite."""
        everything = torch.softmax(logits.float() / self._temperature, dim=-1)
        likeliest, ids = everything.topk(self._top_k if self._top_k > 0 else len(everything))
        nucleus = torch.where(likeliest.cumsum(0) - likeliest < self._top_p, likeliest, 0.0)
        drawn = ids[torch.multinomial(nucleus, 1, generator=self._generator)]
        anew = torch.multinomial(everything, 1, generator=self._generator)
        recent = torch.tensor(output_ids[-self._window :], device=logits.device)
        token = torch.where((recent == drawn).sum() >= self._most, anew, drawn)
        return torch.full_like(logits, -torch.inf).index_fill_(0, token, 0.0)
