"""A stream of a flow that keeps no caches, and the window of it that a chunk computes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cosyvoice_triton.constants import TOKEN_MEL_RATIO
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.voice.prompt import Prompt


@dataclass(kw_only=True)
class WindowStream(Stream):
    prompt: Prompt
    mel: Tensor  # (1, 2P, mel): the prompt's, on the device
    speaker: Tensor  # (1, mel): projected x-vector


WindowChunk = Chunk[WindowStream]


def forgotten_tokens(chunk: WindowChunk) -> int:
    """Return how many tokens of the stream are older than the chunk's window."""
    return len(chunk.stream.prompt.tokens) + chunk.offset + chunk.new - chunk.computed


def noise_indices(chunks: list[WindowChunk], frames: int) -> Tensor:
    """Return the absolute index of each window's frames: (B, frames)."""
    index = torch.arange(frames).repeat(len(chunks), 1)
    for position, chunk in zip(index, chunks, strict=True):
        position[chunk.stream.mel.shape[1] :] += TOKEN_MEL_RATIO * forgotten_tokens(chunk)
    return index
