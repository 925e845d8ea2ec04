"""The base of the streaming vocoders: slots of streams, and chunks that are rendered in batches."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from cosyvoice_triton.batches import isolated
from cosyvoice_triton.device import copied, on_device, on_host
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.token2wav.gpu.graphs import Graphs
from cosyvoice_triton.token2wav.gpu.limits import HIFT_FRAMES, BatchLimits, Size
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from cosyvoice_triton.token2wav.stream import Chunk, NotFiniteError, VocoderState


class VocoderRenderer(Protocol):
    """One pass of a vocoder over a batch of chunks, which reads what is kept of their streams and replaces it."""

    scratch: int  # the slot that padding rows write to

    def render(self, begun: bool, mel: Tensor, slots: Tensor, *others: Tensor) -> Tensor:
        """Render the speech (B, N) of chunks that all continue their streams (`begun`) or all begin them: mel (B, 80,
        T), slots (B,), and what else the vocoder needs of each row."""
        ...

    def inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        """Make those tensors for a batch of that size, of padding rows."""
        ...


class GraphedRenderer:
    """A renderer by CUDA graphs; batches that no graph holds are split."""

    def __init__(
        self,
        plain: VocoderRenderer,
        limits: BatchLimits,
        *,
        most: int = HIFT_FRAMES,
        make: Callable[..., Graphs] = Graphs,
    ):
        """Make the graphs of a renderer. most: frames of a batch, padding included. make: makes the graphs."""
        self._plain = plain
        # A later segment of a text begins with a hop of any length.
        names = {False: "the vocoder's first chunks", **({} if limits.starts else {True: "the vocoder"})}
        self._graphs = {
            begun: make(
                partial(plain.render, begun),
                plain.inputs,
                limits.sizes(limits.chunk_frames, most),
                name,
                worker=limits.worker,
            )
            for begun, name in names.items()
        }

    def render(self, begun: bool, mel: Tensor, slots: Tensor, *others: Tensor) -> Tensor:
        graphs = self._graphs[begun]

        def compute(part: slice, size: Size | None) -> Tensor:
            inputs = [x[part] for x in (mel, slots, *others)]
            if size is None:
                return self._plain.render(begun, *inputs)
            B = len(inputs[0])
            graphs.inputs(size)[1][B:] = self._plain.scratch
            return graphs.run(size, *inputs)[:B]

        return graphs.run_rows(len(mel), mel.shape[2], compute)


@dataclass(frozen=True, kw_only=True)
class VocoderOptions:
    """How a stack's `vocoder_loader` is to load its vocoder. graphs: whether to capture CUDA graphs, on a GPU."""

    device: str
    dtype: torch.dtype
    limits: BatchLimits
    graphs: bool


class StreamSlots:
    """What streams carry from chunk to chunk, allocated once: tensors with a row for each stream and one more,
    `scratch`, which padding rows of a batch write to."""

    def __init__(self, slots: int, *kept: Tensor):
        self.scratch = slots
        self.nbytes = sum(x.nbytes for x in kept)
        self._free = list(range(slots))

    def acquire(self) -> int:
        if not self._free:
            raise UnavailableError(f"all {self.scratch} streams of the vocoder are taken")
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)


class Rendering(NamedTuple):
    """A chunk of `frames` whose audio is a row of what `speech` waits for: which rows are finite (B,), and all (B, N).
    begun: whether its stream had begun before."""

    chunk: Chunk
    frames: int
    begun: bool
    row: int
    speech: Callable[[], list[Tensor]]


class BatchVocoder(ABC):
    """Renders mel chunks of many streams (`open`, `begin`, `close`), in batches of chunks of a length class, or whole
    utterances (`whole`). Forms of it say how a batch is rendered and what is withheld.
    """

    needs: int  # mel frames with which a stream that goes on begins

    def __init__(
        self,
        network: Any,
        noise: NoiseTape,
        *,
        limits: BatchLimits,
        graphs: bool = True,
        load_exact: Callable[[], Any] | None = None,
        pool: StreamSlots | None = None,
    ):
        """Make the vocoder of a network. graphs: by CUDA graphs on a GPU. load_exact: loads the network in float32;
        without it, `network` is that. pool: of another vocoder, whose streams are rendered."""
        self._network, self._noise, self._limits, self._load_exact = network, noise, limits, load_exact
        self._device = network.conv_pre.weight.device
        self.pool: Any = pool or self._make_pool()
        self._plain: Any = self._make_renderer()
        self._graphed: GraphedRenderer | None = None
        if graphs and self._device.type == "cuda":
            self._fused = self._make_fused()  # of all workers
            self._graphed = GraphedRenderer(self._fused, limits)

    @property
    def nbytes(self) -> int:
        """Return the memory in bytes that is reserved for streams."""
        return self.pool.nbytes

    @property
    def longest(self) -> int:
        """Return the mel frames of the longest chunk that CUDA graphs hold."""
        return self._limits.chunk_frames[-1]

    def for_worker(self, worker: int) -> Self | None:
        """See `StreamingFlow.for_worker`."""
        if self._graphed is None:
            return None
        vocoder = copy(self)
        vocoder._limits = self._limits.of_worker(worker)
        vocoder._graphed = GraphedRenderer(self._fused, vocoder._limits)
        return vocoder

    def exact(self) -> Self:
        """Load the same vocoder in float32, by plain operations, over the same streams, for a single use."""
        network = self._load_exact() if self._load_exact else self._network
        return type(self)(network, self._noise, limits=self._limits, graphs=False, pool=self.pool)

    @abstractmethod
    def _make_pool(self) -> StreamSlots:
        """Make what streams carry, for the streams of the limits."""

    @abstractmethod
    def _make_renderer(self) -> VocoderRenderer:
        """Make what renders a batch by the network's own operations."""

    def _make_fused(self) -> VocoderRenderer:
        """Make what is captured in CUDA graphs."""
        return self._plain

    @abstractmethod
    def _pass(
        self, begun: bool, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor, ends: Sequence[bool]
    ) -> Tensor:
        """Render the speech (B, N) of one batch of chunks that all continue their streams (`begun`) or all begin them:
        mel (B, 80, T) of which a row has `frames` (B,), starts (B,): `VocoderState.frame`; ends: rows that are
        final."""

    @abstractmethod
    def _sent(self, frames: int, *, begun: bool, final: bool) -> tuple[int, int]:
        """Return the (mel frames, samples) that a chunk of so many new frames completes."""

    @abstractmethod
    def _whole(self, mel: Tensor, frames: Tensor) -> Tensor:
        """Render the speech (B, N) of whole utterances."""

    def open(self) -> VocoderState:
        """Begin a stream. Raises UnavailableError when all are taken."""
        return VocoderState(self.pool.acquire())

    def close(self, state: VocoderState) -> None:
        """Give back what the stream holds outside of its state."""
        self.pool.release(state.slot)

    @torch.inference_mode()
    def begin(self, chunks: Sequence[Chunk], mels: Sequence[Tensor]) -> Callable[[], list[Tensor | Exception]]:
        """Begin to render chunks of different streams, given their new mel frames (80, T) each; return what waits for
        their audio (N,), on the CPU, and returns it, with an exception for a chunk that cannot be rendered.
        NotFiniteError leaves the stream as it was before.

        N is less than that of the frames while a part is withheld. Chunks of a length class share a pass; all passes
        are launched before one is waited for.
        """
        audio: list[Tensor | Exception] = [torch.zeros(0)] * len(chunks)
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        ready = []
        for index, (chunk, mel) in enumerate(zip(chunks, mels, strict=True)):
            state = chunk.stream.vocoder
            ready.append(mel if state.pending is None else torch.cat([state.pending, mel], dim=1))
            frames = ready[index].shape[1]
            if frames == 0 and chunk.final and state.begun:
                audio[index] = self._rest(chunk, ready[index])
            elif frames and (chunk.final or state.begun or frames >= self.needs):
                groups[self._length_class(frames), state.begun].append(index)
            elif mel.isfinite().all():  # it waits for the host, but hops this short are rare
                state.pending = ready[index].clone()  # the flow's next mel may be at the same place
            else:
                audio[index] = NotFiniteError("the mel is not finite")
        launched: dict[int, Rendering] = {}
        for (_, begun), members in groups.items():
            rows = [(chunks[index], ready[index]) for index in members]
            for index, made in zip(members, isolated(partial(self._launch, begun), rows), strict=True):
                if isinstance(made, Exception):
                    audio[index] = made
                else:
                    launched[index] = made

        def finish() -> list[Tensor | Exception]:
            for index, rendering in launched.items():
                audio[index] = self._audio(rendering)
            return audio

        return finish

    def _rest(self, chunk: Chunk, mel: Tensor) -> Tensor | Exception:
        """Return the audio (N,) that is withheld of a stream that ends with no new frame: mel (80, 0)."""
        return self._audio(self._launch(True, [(chunk, mel)])[0])

    def _launch(self, begun: bool, rows: Sequence[tuple[Chunk, Tensor]]) -> list[Rendering]:
        """Launch one pass over mels (80, T) of chunks that all continue (`begun`) or all begin their streams."""
        longest = max(mel.shape[1] for _, mel in rows)
        mels, positions, finals = [], [], []
        for chunk, mel in rows:
            state = chunk.stream.vocoder
            mels.append(F.pad(mel, (0, longest - mel.shape[1])))
            positions.append([state.slot, state.frame, mel.shape[1]])
            finals.append(chunk.final)
        slots, starts, frames = on_device(positions, self._device).unbind(1)
        made = self._pass(begun, torch.stack(mels), slots, starts, frames, finals)
        speech = copied(made.sum(1).isfinite(), made)
        return [Rendering(chunk, mel.shape[1], begun, row, speech) for row, (chunk, mel) in enumerate(rows)]

    def _audio(self, rendering: Rendering) -> Tensor | Exception:
        """Wait for the audio (N,) of a chunk."""
        chunk, (finite, speech) = rendering.chunk, rendering.speech()
        if not finite[rendering.row]:  # what is kept of the stream has then not been replaced
            return NotFiniteError("the audio is not finite")
        sent, samples = self._sent(rendering.frames, begun=rendering.begun, final=chunk.final)
        state = chunk.stream.vocoder
        state.frame += sent
        state.begun, state.pending = True, None
        return speech[rendering.row, :samples]

    def _length_class(self, frames: int) -> int:
        """Return the smallest class that holds that many frames; beyond all of them, the number itself."""
        classes = self._limits.chunk_frames
        index = bisect_left(classes, frames)
        return classes[index] if index < len(classes) else frames

    @torch.inference_mode()
    def whole(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Render the audio (N,) of whole utterances, on the CPU, given their mels (80, T)."""
        lengths = [mel.shape[1] for mel in mels]
        mel = torch.stack([F.pad(mel, (0, max(lengths) - mel.shape[1])) for mel in mels])
        (speech,) = on_host(self._whole(mel, on_device(lengths, mel.device)))
        return [
            row[: self._sent(length, begun=False, final=True)[1]] for row, length in zip(speech, lengths, strict=True)
        ]
