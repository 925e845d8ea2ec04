"""Silent tokens that are heard as silence, although random weights make noise of all of them: for measurements of what
is heard first. A stack with this vocoder is served as any other stack is, by templates of its own.

    python -m tests.random_weights.silence STACK COMMAND ...     a command of `cosyvoice-triton` with such a stack
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from cosyvoice_triton import cli, stacks
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.server.rendering import TEMPLATES
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, VocoderOptions
from torch import Tensor

from tests.random_weights.llm import SILENT_IDS

TOKEN_SAMPLES = SAMPLE_RATE // TOKEN_RATE
_MODEL = """import sys

sys.path.insert(0, {root!r})

from cosyvoice_triton.token2wav.serving.model import Token2WavModel
from tests.random_weights.silence import quiet


class TritonPythonModel(Token2WavModel):
    stack = quiet({stack!r})
"""


def quiet(name: str) -> Stack:
    """Return the stack with silent tokens that are silent in streams."""
    stack = stacks.named(name)
    load = "load_causal" if stack.vocoder_loader == stacks.COSYVOICE3.vocoder_loader else "load"
    return replace(stack, vocoder_loader=f"{__name__}:{load}")


def register(name: str, folder: Path) -> None:
    """Put such a stack in the place of the one of that name, in this process; its templates are written to `folder`."""
    stack = stacks.named(name)
    shutil.copytree(TEMPLATES / stack.templates, folder, dirs_exist_ok=True)
    root = str(Path(__file__).resolve().parents[2])
    (folder / stack.token2wav / "1" / "model.py").write_text(_MODEL.format(root=root, stack=name), encoding="utf-8")
    stacks.unregister(name)
    stacks.register(replace(stack, templates=str(folder)))


def load(path: Path, options: VocoderOptions) -> "QuietVocoder":
    return QuietVocoder(resolve_name(stacks.DIT.vocoder_loader)(path, options), {})


def load_causal(path: Path, options: VocoderOptions) -> "QuietVocoder":
    return QuietVocoder(resolve_name(stacks.COSYVOICE3.vocoder_loader)(path, options), {})


class QuietVocoder:
    """Another vocoder, whose audio of SILENT_IDS is zeros. streams: tokens and samples sent so far, by slot."""

    def __init__(self, vocoder: BatchVocoder, streams: dict[int, tuple[np.ndarray, int]]) -> None:
        self._vocoder, self._streams = vocoder, streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vocoder, name)

    def for_worker(self, worker: int) -> "QuietVocoder | None":
        made = self._vocoder.for_worker(worker)
        return None if made is None else QuietVocoder(made, self._streams)

    def exact(self) -> "QuietVocoder":
        return QuietVocoder(self._vocoder.exact(), self._streams)

    def begin(self, chunks: Sequence[Chunk], mels: Sequence[Tensor]) -> Callable[[], list[Tensor | Exception]]:
        vocoded = self._vocoder.begin(chunks, mels)

        def finish() -> list[Tensor | Exception]:
            audio = [each.clone() if isinstance(each, Tensor) else each for each in vocoded()]  # of inference mode
            for chunk, speech in zip(chunks, audio, strict=True):
                if isinstance(speech, Tensor):
                    self._mute(chunk, speech)
            return audio

        return finish

    def _mute(self, chunk: Chunk, speech: Tensor) -> None:
        slot = chunk.stream.vocoder.slot
        tokens, sent = self._streams[slot] if chunk.offset else (chunk.tokens, 0)
        # Of a cumulative flow a chunk has all tokens of its stream.
        first = chunk.offset + chunk.new + (0 if chunk.final else LOOKAHEAD_TOKENS) - len(chunk.tokens)
        tokens = np.concatenate([tokens[:first], chunk.tokens])
        heard = np.repeat(~np.isin(tokens, SILENT_IDS), TOKEN_SAMPLES)[sent : sent + len(speech)]
        speech *= torch.from_numpy(heard)
        self._streams[slot] = tokens, sent + len(speech)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        register(sys.argv[1], Path(made))
        sys.exit(cli.main(sys.argv[2:]))
