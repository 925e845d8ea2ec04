"""Vocoding at another speed than the flow's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cosyvoice_triton.constants import TOKEN_MEL_RATIO
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder


def begin_vocoding(
    vocoder: BatchVocoder, chunks: Sequence[Chunk], mels: Sequence[Tensor]
) -> Callable[[], list[Tensor | Exception]]:
    """Do what `BatchVocoder.begin` does, with the chunks of streams that have a speed stretched to it. What is then
    longer than the vocoder's CUDA graphs is vocoded in parts, all but the last one at once."""
    if all(chunk.stream.stretch is None for chunk in chunks):
        return vocoder.begin(chunks, mels)
    rows = [_Row(chunk, _parts(chunk, mel, vocoder.longest)) for chunk, mel in zip(chunks, mels, strict=True)]
    while longer := [row for row in rows if len(row.parts) > 1]:
        _begin(vocoder, longer)()
    ending = _begin(vocoder, [row for row in rows if row.parts])

    def finish() -> list[Tensor | Exception]:
        ending()
        return [row.audio() for row in rows]

    return finish


@dataclass
class _Row:
    """A chunk, the parts (80, T) of its mel that are not vocoded yet, and the audio of the others; or why it has
    none."""

    chunk: Chunk
    parts: list[Tensor]
    made: list[Tensor] = field(default_factory=list)
    error: Exception | None = None

    def add(self, result: Tensor | Exception) -> None:
        """Take the result of its next part."""
        if isinstance(result, Tensor):
            self.made.append(result)
            return
        self.parts.clear()
        # Once a part of it is vocoded, the vocoder is past the chunk's beginning, and it cannot be rendered again.
        self.error = RuntimeError(str(result)) if self.made else result

    def audio(self) -> Tensor | Exception:
        if self.error is not None:
            return self.error
        if self.chunk.stream.stretch is not None:
            self.chunk.stream.stretch.keep()
        return torch.cat(self.made)


def _parts(chunk: Chunk, mel: Tensor, longest: int) -> list[Tensor]:
    """Return the mel of a chunk at the speed of its stream, in parts of up to `longest` frames."""
    if (stretch := chunk.stream.stretch) is None:
        return [mel]
    return list(stretch.stretched(mel, TOKEN_MEL_RATIO * chunk.offset, chunk.final).split(longest, dim=1))


def _begin(vocoder: BatchVocoder, rows: Sequence[_Row]) -> Callable[[], None]:
    """Begin to vocode the next part of each row; return what waits for the audio, and adds it."""
    chunks = [replace(row.chunk, final=row.chunk.final and len(row.parts) == 1) for row in rows]
    vocoded = vocoder.begin(chunks, [row.parts.pop(0) for row in rows])

    def finish() -> None:
        for row, result in zip(rows, vocoded(), strict=True):
            row.add(result)

    return finish
