"""Faults that a test asks for in the models of a running server; without TTS_TEST_FAULTS there are none.

A file of a fault's name in that directory makes the next possible place fail, once.
"""

from typing import Literal, get_args

from common.process.environment import ModelEnvironment

Fault = Literal[
    "gpu_error",  # token2wav: a CUDA error after which nothing works
    "out_of_memory",  # token2wav: in a batch of several chunks
    "bad_chunk",  # token2wav: a chunk that fails in every batch
    "nan_audio",  # token2wav: the audio of one chunk is not finite
    "token2wav_thread",  # its thread ends
    "nan_logits",  # the LLM on a CPU: one row's logits are not finite
    "llm_thread",  # the LLM's thread ends
]
GPU_ERROR = "CUDA error: an illegal memory access was encountered"


def take(fault: Fault) -> bool:
    """Whether this fault is to happen now. ValueError if the directory contains a name that is none."""
    directory = ModelEnvironment.read().faults
    if directory is None:
        return False
    wanted = {path.name: path for path in directory.iterdir()}
    if unknown := sorted(wanted.keys() - set(get_args(Fault))):
        raise ValueError(f"no fault {unknown[0]!r}; there are {', '.join(get_args(Fault))}")
    if fault not in wanted:
        return False
    wanted[fault].unlink()
    return True
