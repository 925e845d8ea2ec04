"""Faults that a test asks for in the models of a running server; without TTS_TEST_FAULTS, which only tests and soaks
set, there are none.

A file of a fault's name in that directory makes the next possible place fail, once.
"""

import os
from pathlib import Path
from typing import Literal, get_args

from cosyvoice_triton.monitoring.environment import TEST_FAULTS

Fault = Literal[
    "gpu_error",  # token2wav: a CUDA error after which nothing works
    "out_of_memory",  # token2wav: in a batch of several chunks
    "bad_chunk",  # token2wav: a chunk that fails in every batch
    "nan_mel",  # token2wav: the mel of one chunk is not finite
    "nan_voice",  # token2wav: the prompt cache of one chunk's voice is not finite (DiT)
    "token2wav_thread",  # its thread ends
    "nan_logits",  # the engines onnxruntime_genai and cuda: one row's logits are not finite
    "llm_thread",  # the LLM's thread ends
]
GPU_ERROR = "CUDA error: an illegal memory access was encountered"


def take(fault: Fault) -> bool:
    """Return whether this fault is to happen now. ValueError if there is no such directory, or a name in it is none."""
    if not (folder := os.environ.get(TEST_FAULTS)):  # asked at each step of the LLM
        return False
    directory = Path(folder)
    if not directory.is_dir():
        raise ValueError(f"{TEST_FAULTS}={directory} is not a directory")
    wanted = {path.name: path for path in directory.iterdir()}
    if unknown := sorted(wanted.keys() - set(get_args(Fault))):
        raise ValueError(f"no fault {unknown[0]!r}; there are {', '.join(get_args(Fault))}")
    if fault not in wanted:
        return False
    try:
        wanted[fault].unlink()
    except FileNotFoundError:  # another process has taken it in the meantime
        return False
    return True
