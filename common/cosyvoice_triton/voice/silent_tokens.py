"""Which speech tokens sound like silence: a property of a checkpoint's speech tokenizer.

They are found by tokenizing recordings with silence and room noise around them, by `cosyvoice-triton prepare`, which
also renders them (`prepare.silence`), or else the first start, and are kept in a file beside the checkpoint. The
recordings are needed: the tokenizer's mel is relative to the loudest of what it hears.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from cosyvoice_triton import samples
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.demo_checkpoint import has_random_weights
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.voice.audio import at_rate, load_recording
from cosyvoice_triton.voice.encoders import AudioTokenizer

logger = logging.getLogger(__name__)

FILE = "silent_tokens.json"
NOISES_DB = (-70.0, -60.0, -50.0, -45.0)  # below the speech; silence itself, too
COLOURS = (0, 1, 2)  # white, pink, brown: the power falls with this power of the frequency
SECONDS = 2.0  # of each silence
_EDGE = 3  # tokens next to the speech, which hear it
_OFTEN, _RARELY = 3, 10  # how often a token must be silence, and how many times as often as speech
_SPEECH_DB = -30.0
_TOKEN = PROMPT_SAMPLE_RATE // TOKEN_RATE  # samples

Tokenize = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]  # waves (N_i,) at 16 kHz -> ids
Choose = Callable[[frozenset[int]], frozenset[int]]


def silent_tokens(model_dir: str | Path, stack: Stack, choose: Choose | None = None) -> frozenset[int]:
    """Return the silent tokens of a checkpoint: the stack's, or those of its file, which is written if it is missing.
    None of random weights without a file, and of a folder without a speech tokenizer.

    choose: returns which of those that the tokenizer gives are kept, all by default.
    """
    path, tokenizer = Path(model_dir) / FILE, Path(model_dir) / stack.speech_tokenizer
    if path.is_file():
        return frozenset(json.loads(path.read_text(encoding="utf-8")))
    if stack.silent_tokens or not tokenizer.is_file() or has_random_weights(Path(model_dir)):
        return stack.silent_tokens
    found = find_silent_tokens(AudioTokenizer(model_dir))
    if choose:
        found = choose(found)
    logger.info("%s: %d speech tokens sound like silence", tokenizer, len(found))
    work = path.with_name(f".{FILE}-{os.getpid()}")  # of several processes that start, none reads half a file
    try:
        work.write_text(json.dumps(sorted(found)) + "\n", encoding="utf-8")
        work.replace(path)
    except OSError as error:
        logger.warning("%s cannot be kept, and is made again at each start: %s", path, error)
    return found


def find_silent_tokens(tokenize: Tokenize) -> frozenset[int]:
    """Return the ids that are silence around the package's recordings, and hardly ever speech in them."""
    silent: Counter[int] = Counter()
    spoken: Counter[int] = Counter()
    random = np.random.default_rng(0)
    for file in sorted(samples.FOLDER.glob("*.wav")):
        speech = at_rate(load_recording(file), PROMPT_SAMPLE_RATE)
        speech = speech[: len(speech) // _TOKEN * _TOKEN]
        powers = np.square(speech, dtype=np.float64).reshape(-1, _TOKEN).mean(axis=1)
        level = np.percentile(powers, 75)
        noises = [(None, 0), *((decibels, colour) for decibels in NOISES_DB for colour in COLOURS)]
        around = [[_noise(random, level, *noise) for _ in range(2)] for noise in noises]
        for ids in tokenize([np.concatenate([before, speech, after]) for before, after in around]):
            begin, end = int(SECONDS * TOKEN_RATE), int(SECONDS * TOKEN_RATE) + len(powers)
            silent.update(ids[: begin - _EDGE].tolist() + ids[end + _EDGE :].tolist())
            spoken.update(ids[begin:end][powers > level * 10 ** (_SPEECH_DB / 10)].tolist())
    return frozenset(each for each, count in silent.items() if count >= max(_OFTEN, _RARELY * spoken[each]))


def _noise(random: np.random.Generator, level: float, decibels: float | None, colour: int) -> np.ndarray:
    """Return noise that is so far below the power `level`; None: silence."""
    size = int(SECONDS * PROMPT_SAMPLE_RATE)
    if decibels is None:
        return np.zeros(size, np.float32)
    spectrum = np.fft.rfft(random.standard_normal(size))
    wave = np.fft.irfft(spectrum / np.maximum(1, np.arange(len(spectrum))) ** (colour / 2), size)
    return (wave / wave.std() * np.sqrt(level * 10 ** (decibels / 10))).astype(np.float32)
