"""Fixtures of the offline tools and of their LLM: a short manifest over the demo checkpoint of random weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.constants import HOP_SAMPLES, PROMPT_SAMPLE_RATE, TOKEN_MEL_RATIO
from cosyvoice_triton.voice.audio import load_audio, save_audio

from tests.support.llm_fixtures import genai_dir, install, llm_dir, tokenizer  # noqa: F401

TOKEN_SAMPLES = TOKEN_MEL_RATIO * HOP_SAMPLES
STACKS = {stack.name: stack.checkpoint for stack in stacks.BUILT_IN}
ROWS = [
    {"id": "first", "prompt_audio": "voice.wav", "prompt_text": "Your call.", "target_text": "One."},
    {"id": "second", "prompt_audio": "voice.wav", "prompt_text": "", "target_text": "Two. Then three."},
    {"id": "third", "prompt_audio": "other.wav", "prompt_text": "Your call.", "target_text": "三。"},
]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other are very slow when another process uses the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def manifest(tmp_path):
    """`manifest(*rows)`: a file of those rows, in a folder with recordings of 1 s, 1.2 s and of silence."""
    wav = load_audio(samples.FOLDER / "reference_en.wav", PROMPT_SAMPLE_RATE)
    save_audio(tmp_path / "voice.wav", wav[:PROMPT_SAMPLE_RATE], PROMPT_SAMPLE_RATE)
    save_audio(tmp_path / "other.wav", wav[PROMPT_SAMPLE_RATE : int(2.2 * PROMPT_SAMPLE_RATE)], PROMPT_SAMPLE_RATE)
    save_audio(tmp_path / "silence.wav", np.zeros(PROMPT_SAMPLE_RATE, np.float32), PROMPT_SAMPLE_RATE)

    def write(*rows: dict) -> Path:
        path = tmp_path / "manifest.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
