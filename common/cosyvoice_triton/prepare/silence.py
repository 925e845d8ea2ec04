"""Which speech tokens of a checkpoint are silence, found once: by its speech tokenizer, and heard by its token2wav."""

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch

from cosyvoice_triton import samples
from cosyvoice_triton.audible import STEP, window_levels
from cosyvoice_triton.config import Token2WavConfig
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS, SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.voice.audio import load_recording
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.prompt import Prompt
from cosyvoice_triton.voice.silent_tokens import silent_tokens

logger = logging.getLogger(__name__)

SPOKEN = slice(10, 35)  # speech tokens of the recording that are spoken before those that are judged
TIMES, EDGE = 10, 3  # how often each is repeated, and how many at both ends hear their neighbours
# Below the loud windows of the speech. In the demo voices silent tokens are 27 dB below and more, and of eight speech
# tokens by chance seven are at most 10 below; the eighth is an s.
HEARD_DB = -20.0
_LOUD = 95  # percentile

Render = Callable[[np.ndarray], np.ndarray]  # speech tokens (n,) -> float32 (N,) at 24 kHz


def prepared(checkpoint: Path, stack: Stack) -> frozenset[int]:
    """Return the silent tokens of a checkpoint, which are written beside it."""

    def inaudible(found: frozenset[int]) -> frozenset[int]:
        prompt, render = renderer(checkpoint, stack)
        return found - heard(found, prompt.tokens[SPOKEN], render)

    return silent_tokens(checkpoint, stack, inaudible)


def heard(ids: Collection[int], spoken: np.ndarray, render: Render) -> frozenset[int]:
    """Return those of `ids` that are loud when they are rendered after `spoken`, speech tokens (n,)."""
    judged = sorted(ids)
    waveform = render(np.concatenate([spoken, np.repeat(judged, TIMES)]).astype(np.int64))
    token = SAMPLE_RATE // TOKEN_RATE // STEP  # windows
    levels = window_levels(waveform)
    loud = np.percentile(levels[: len(spoken) * token], _LOUD) * 10 ** (HEARD_DB / 10)
    begins = [len(spoken) + TIMES * index + EDGE for index in range(len(judged))]
    medians = [np.median(levels[begin * token : (begin + TIMES - 2 * EDGE) * token]) for begin in begins]
    found = frozenset(each for each, median in zip(judged, medians, strict=True) if median > loud)
    if found:
        logger.warning("not silent although the tokenizer takes silence for them: %s", sorted(found))
    return found


def renderer(checkpoint: Path, stack: Stack) -> tuple[Prompt, Render]:
    """Return the prompt of a recording of the package, and what renders speech tokens in its voice."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Token2WavConfig(
        model_dir=str(checkpoint),
        device=device,
        flow_runtime="torch",
        max_streams=1,
        first_hop_tokens=FLOW_CHUNK_TOKENS,
    )
    sample = json.loads(samples.MANIFEST.read_text(encoding="utf-8").splitlines()[0])
    prompt = ReferenceEncoder(stack, checkpoint)(load_recording(samples.FOLDER / sample["prompt_audio"]))
    engine = Token2Wav.from_config(stack, config)
    return prompt, lambda tokens: engine.whole(prompt, tokens)
