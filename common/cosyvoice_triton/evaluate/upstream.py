"""A checkpoint computed by upstream's own code and by ours, from the same prompt, tokens and noise.

Upstream's side is `upstream_program.py`, run by the Python that has upstream's requirements. Both are on the CPU in
float32, and the speech is whole.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import torch

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS, HOP_SAMPLES, TOKEN_MEL_RATIO
from cosyvoice_triton.evaluate import upstream_program
from cosyvoice_triton.llm.checkpoint import made_from, speech_bias
from cosyvoice_triton.llm.interface import LLMPrompt
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.load.samples import read_manifest
from cosyvoice_triton.networks.flow.config import euler_steps
from cosyvoice_triton.networks.hift import HiFTConfig
from cosyvoice_triton.prepare.missing import remedy
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.flow.base import FlowOptions, StreamingFlow
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise, source_noise, uniform_noise
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, VocoderOptions
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.prompt import Prompt

Arrays = dict[str, np.ndarray]
# Largest difference, as a part of the largest value; of log-probabilities as it is. Upstream's own code on another
# processor differs by a tenth of that. An LLM in bfloat16 is beyond its limit.
LIMITS = {"text": 0.0, "log_probabilities": 1e-2, "flow_noise": 0.0, "mel": 1e-3, "wave": 1e-2}
# Its code gives the LLM a mask of the newest token alone, which these fill up with "do not attend".
FORGETS = (
    "the first token's agree, later ones do not: upstream's code needs transformers 4.51.3, and with 4.53 or newer its "
    "LLM forgets what it said"
)


class Step(NamedTuple):
    """A step that both computed. difference: see LIMITS. remark: in words."""

    name: str
    difference: float
    remark: str

    @property
    def passed(self) -> bool:
        return self.difference <= LIMITS[self.name]


def compared(options: StackOptions, repository: Path, python: str) -> Iterator[Step]:
    """Yield the steps in their order; one that upstream could not compute is named by its program.

    repository: of upstream, the path. python: of its installation. ValueError if it cannot run at all.
    """
    stack, folder = stacks.named(options.stack), options.checkpoint_dir
    if not any((repository / name).is_dir() for name in ("cosyvoice", "cosyvoice2")):
        raise ValueError(
            f"{repository} has neither cosyvoice/ nor cosyvoice2/: give a checkout of upstream's repository"
        )
    if missing := [each for each in options.missing_files() if each != options.engine_dir]:
        raise ValueError(f"{missing[0]} is missing; {remedy(options, missing[0])}")
    if not any((folder / name).is_file() for name in upstream_program.CONFIGURATIONS):
        raise ValueError(
            f"{folder} has none of {', '.join(upstream_program.CONFIGURATIONS)}, of which upstream's classes are made: "
            f"copy it from {stack.repository}"
        )
    tokenizer = LLMTokenizer.from_dir(options.tokenizer_dir, stack.llm.tokenizer)
    sample = read_manifest(samples.MANIFEST, limit=1)[0]
    assert sample.prompt_audio is not None
    prompt = ReferenceEncoder(stack, folder)(sample.prompt_audio)
    asked = LLMPrompt(sample.target_text, prompt_text=sample.prompt_text, prompt_tokens=prompt.tokens.tolist())
    ids, tokens = tokenizer.encode_prompt(asked), prompt.tokens[: 2 * FLOW_CHUNK_TOKENS]
    source = uniform_noise if stack is stacks.COSYVOICE3 else source_noise
    # One frame more than the speech: the source of CosyVoice3 is ahead of it.
    frames = TOKEN_MEL_RATIO * len(tokens) + 1
    given = {
        "text": ids[1 : list(ids).index(tokenizer.task_id)],
        "texts": np.array([tokenizer.decode(sum(tokenizer.prompt_ids(asked), [])), sample.target_text]),
        "prompt_tokens": prompt.tokens,
        "tokens": tokens,
        "mel": prompt.mel,
        "embedding": prompt.embedding,
        "flow_noise": flow_noise().read(0, TOKEN_MEL_RATIO * (len(prompt.tokens) + len(tokens))).T.numpy(),
        "source_noise": source(HiFTConfig.harmonics + 1).read(0, frames * HOP_SAMPLES).numpy(),
    }
    theirs = _theirs(
        python, [repository.resolve(), folder, made_from(options.tokenizer_dir) or stack.llm.weights], given
    )
    ours = _networks(stack, folder, prompt, tokens)
    if "log_probabilities" in theirs:
        ours |= _llm(options, tokenizer, ids, tokens)
    yield from _steps(given | ours, theirs)


def _theirs(python: str, arguments: list[Path | str], given: Arrays) -> Arrays:
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch) / name for name in ("given.npz", "found.npz")]
        np.savez(paths[0], **given)
        command = [python, upstream_program.__file__, *map(str, [*arguments, *paths])]
        # A GPU of upstream's installation computes in other formats.
        done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""})
        if done.returncode:
            raise ValueError(f"upstream's side ended with code {done.returncode}: {' '.join(command[:3])}, see above")
        with np.load(paths[1]) as found:
            return dict(found)


def _networks(stack: Stack, folder: Path, prompt: Prompt, tokens: np.ndarray) -> Arrays:
    """Return the mel (80, 2N) and the audio (N,) as token2wav computes them."""
    limits = BatchLimits(max_streams=1)
    how: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "limits": limits}
    steps = euler_steps(folder / stack.flow)
    of_flow = FlowOptions(stack=stack, runtime="torch", steps=steps, prompt_cache_bytes=0, **how)
    flow: StreamingFlow[Any] = resolve_name(stack.loader)(folder / stack.flow, of_flow)
    vocoder: BatchVocoder = resolve_name(stack.vocoder_loader)(folder / stack.hift, VocoderOptions(graphs=False, **how))
    with torch.inference_mode():
        (mel,) = flow.whole([(prompt, tokens)])
        (wave,) = vocoder.whole([mel])
    return {"mel": mel.numpy(), "wave": wave.numpy()}


def _llm(options: StackOptions, tokenizer: LLMTokenizer, ids: np.ndarray, tokens: np.ndarray) -> Arrays:
    """Return the log-probabilities (N + 1, ids of speech and what follows) after a prompt of `ids` and each token."""
    from transformers import Qwen2ForCausalLM

    folder, begin = options.tokenizer_dir, tokenizer.first_speech_id
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bias = torch.from_numpy(speech_bias(folder, tokenizer, model.config.vocab_size))
    row = torch.from_numpy(np.concatenate([ids, tokenizer.to_llm_ids(tokens.tolist())]))
    with torch.inference_mode():
        states = model.model(row[None]).last_hidden_state[0, len(ids) - 1 :]
        return {"log_probabilities": (model.lm_head(states) + bias)[:, begin:].log_softmax(1).numpy()}


def _steps(ours: Arrays, theirs: Arrays) -> Iterator[Step]:
    for name in [name for name in LIMITS if name in theirs]:
        own, other = ours[name], theirs[name]
        if name == "log_probabilities":
            own = own[:, : other.shape[1]]
        if own.shape != other.shape:
            yield Step(name, np.inf, f"ours has the shape {own.shape}, upstream's {other.shape}")
            continue
        known = np.isfinite(own) & np.isfinite(other)
        scale = 1.0 if name == "log_probabilities" else float(np.abs(other[known]).max(initial=1e-9))
        difference = float(np.abs(own[known] - other[known]).max(initial=0.0)) / scale
        remark = f"{known.sum()} values"
        if name == "log_probabilities":
            remark = f"{np.mean(own.argmax(1) == other.argmax(1)):.0%} of {len(own)} most probable tokens are the same"
            if difference > LIMITS[name] >= np.abs(own[0] - other[0])[known[0]].max():
                remark = FORGETS
        yield Step(name, difference, remark)
