"""The backend `hf`: transformers' generate, one batch after another, on any device."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, StoppingCriteria

from cosyvoice_triton.llm.checkpoint import read_limits, speech_bias
from cosyvoice_triton.llm.engines.interface import GenerationRequest, require_speech_tokens
from cosyvoice_triton.llm.interface import LengthRatios, LLMPrompt, Sampling
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.offline.batch_lm import GeneratedTokens

RATIOS = LengthRatios()


class TransformersLM:
    """A causal LM restricted to speech tokens. A batch takes as long as its longest answer.

    All rows of a batch share one random seed, so the result of a prompt depends on the others in its batch.
    """

    def __init__(self, model: Any, tokenizer: LLMTokenizer, limits: tuple[int, int], batch_size: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._batch_size = batch_size

    @classmethod
    def load(cls, model_dir: Path, tokenizer: LLMTokenizer, batch_size: int, device: str) -> "TransformersLM":
        """ValueError if `model_dir` does not hold a CosyVoice LLM."""
        limits = read_limits(model_dir)
        require_speech_tokens(tokenizer, limits.vocab_size, model_dir)
        dtype = torch.float32 if device == "cpu" else "auto"
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        model = model.to(device).eval()
        # Minus infinity for all but speech tokens, before any penalty; also holds the bias of the official head.
        bias = torch.from_numpy(speech_bias(model_dir, tokenizer, limits.vocab_size))
        model.lm_head.bias = torch.nn.Parameter(bias.to(device, model.lm_head.weight.dtype))
        return cls(model, tokenizer, limits, batch_size)

    def close(self) -> None:
        """Nothing to do: nothing runs between batches."""

    def generate(self, prompts: Sequence[LLMPrompt], sampling: Sampling) -> list[GeneratedTokens | Exception]:
        results: list[GeneratedTokens | Exception] = [ValueError("not generated")] * len(prompts)
        requests: dict[int, GenerationRequest] = {}
        for index, prompt in enumerate(prompts):
            try:
                requests[index] = self._request(prompt, sampling)
            except ValueError as error:
                results[index] = error
        waiting = iter(requests)
        while members := list(islice(waiting, self._batch_size)):
            try:
                generated = self._generate([requests[index] for index in members])
            except Exception as error:  # such as running out of GPU memory
                results = [error if index in members else result for index, result in enumerate(results)]
                continue
            for index, ids in zip(members, generated, strict=True):
                results[index] = self._answer(prompts[index], ids)
        return results

    def _request(self, prompt: LLMPrompt, sampling: Sampling) -> GenerationRequest:
        if sampling.ras_window:
            raise ValueError(f"ras_window {sampling.ras_window}: transformers has no repetition-aware sampling")
        ids = self._tokenizer.encode_prompt(prompt)
        sampling = RATIOS.bound(sampling, prompt, self._tokenizer.text_length(prompt.target_text))
        request = GenerationRequest(ids, sampling, self._tokenizer.end_ids)
        request.check(*self._limits)
        return request

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """The generated ids of each request, including its end token if there is one."""
        device, longest = self._model.device, max(len(request.input_ids) for request in requests)
        ids = torch.full(
            (len(requests), longest), self._tokenizer.sos_id, device=device
        )  # is in every prompt, so padding adds no repetition penalty
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):  # left padding, so that all answers begin at the same position
            ids[row, longest - len(request.input_ids) :] = torch.tensor(request.input_ids)
            mask[row, longest - len(request.input_ids) :] = 1
        sampling, end_ids = requests[0].sampling, list(self._tokenizer.end_ids)
        least, most = (
            torch.tensor([getattr(request.sampling, name) for request in requests], device=device)
            for name in ("min_tokens", "max_tokens")
        )
        sampled: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            sampled = {"do_sample": True, "temperature": sampling.temperature}
            sampled |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if sampling.seed is not None:
                torch.manual_seed(sampling.seed)
            output = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=int(most.max()),
                repetition_penalty=sampling.repetition_penalty,
                eos_token_id=end_ids,
                pad_token_id=end_ids[0],
                logits_processor=[_MinTokens(longest, least, end_ids)],
                stopping_criteria=[_MaxTokens(longest, most)],
                **sampled,
            )
        answers = output[:, longest:].tolist()
        return [ids[: request.sampling.max_tokens] for ids, request in zip(answers, requests, strict=True)]

    def _answer(self, prompt: LLMPrompt, ids: list[int]) -> GeneratedTokens | Exception:
        ends = [position for position, token in enumerate(ids) if token in self._tokenizer.end_ids]
        speech = ids[: ends[0]] if ends else ids
        try:
            return GeneratedTokens.of(prompt, self._tokenizer.to_speech_ids(speech), "stop" if ends else "length")
        except RuntimeError as error:
            return error


class _MinTokens(LogitsProcessor):
    """No end token before the row's min_tokens."""

    def __init__(self, prompt: int, least: Tensor, end_ids: list[int]) -> None:
        self._prompt, self._least, self._end_ids = prompt, least, end_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        early = input_ids.shape[1] - self._prompt < self._least
        blocked = scores.index_fill(1, torch.tensor(self._end_ids, device=scores.device), -torch.inf)
        return torch.where(early[:, None], blocked, scores)


class _MaxTokens(StoppingCriteria):
    """Stops each row after its max_tokens."""

    def __init__(self, prompt: int, most: Tensor) -> None:
        self._prompt, self._most = prompt, most

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] - self._prompt >= self._most
