from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton.constants import SPEAKER_DIM, SPEECH_VOCAB

from demo_voice.training.dataset import TOKEN_PHONES, TOKEN_SAMPLES
from demo_voice.training.kokoro import DEMO_VOICES

UTTERANCES, TOKENS = 8, 40


def write_noise(work: Path) -> None:
    """Write a working folder with noise instead of speech."""
    rng, count = np.random.default_rng(0), UTTERANCES * TOKENS
    voices = np.arange(UTTERANCES) * len(DEMO_VOICES) // UTTERANCES
    np.save(work / "audio.npy", rng.normal(0, 2000, count * TOKEN_SAMPLES).astype(np.int16))
    np.save(work / "phones.npy", np.zeros(count * TOKEN_PHONES, np.uint8))
    rows = np.stack([np.arange(UTTERANCES), voices, np.full(UTTERANCES, TOKENS)], axis=1)
    np.save(work / "utterances.npy", rows.astype(np.int64))
    np.save(work / "tokens.npy", rng.integers(0, SPEECH_VOCAB, count).astype(np.int16))
    np.save(work / "speakers.npy", rng.normal(size=(UTTERANCES, SPEAKER_DIM)).astype(np.float32))
    (work / "sentences.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * UTTERANCES)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    write_noise(tmp_path)
    return tmp_path
