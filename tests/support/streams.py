"""Small networks, prompts and divisions into chunks for the tests of token2wav."""

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow import CosyVoice3Flow
from cosyvoice_triton.networks.flow.checkpoint import with_rotary
from cosyvoice_triton.networks.hift import split_weight_norm
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.base import StreamingFlow
from cosyvoice_triton.token2wav.stream import Chunk, Stream, VocoderState
from cosyvoice_triton.voice.prompt import Prompt

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"
GOLDEN3 = GOLDEN.with_name("golden_cosyvoice3")
DIT = "item8b_dit_streaming_token2wav"
UNET = "item8c_cosyvoice2_streaming_token2wav"
COSYVOICE3 = "item6c_cosyvoice3_streaming_triton"
VOICES_BYTES = 64 << 20


def prompt(seed: int, tokens: int = 12, vocab: int = 120, speaker_dim: int = 24) -> Prompt:
    rng = np.random.default_rng(seed)
    return Prompt(
        tokens=rng.integers(0, vocab, tokens),
        mel=rng.standard_normal((TOKEN_MEL_RATIO * tokens, 80)).astype(np.float32) - 4,
        embedding=rng.standard_normal(speaker_dim).astype(np.float32),
        text="",
    )


def tensors(prompt: Prompt) -> tuple[torch.Tensor, ...]:
    """Tokens (1, P), mel (1, 2P, 80) and x-vector (1, N) as the networks take them."""
    return tuple(torch.from_numpy(x)[None] for x in (prompt.tokens, prompt.mel, prompt.embedding))


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 120, count)


def randomize(network: torch.nn.Module) -> None:
    """Give a network random weights that keep signals in range."""
    with torch.no_grad():
        for parameter in network.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn_like(parameter) * scale)


class Piece(NamedTuple):
    """The tokens of a chunk, before its stream is known."""

    tokens: np.ndarray
    final: bool
    offset: int | None = None

    def of(self, engine: Token2Wav | StreamingFlow, stream: Stream) -> Chunk:
        return engine.chunk(stream, self.tokens, final=self.final, offset=self.offset)


def pieces(of: Token2Wav | StreamingFlow, tokens: np.ndarray, hops: list[int]) -> list[Piece]:
    """The chunks as the flow of `of` takes them: new tokens, or all so far, and look-ahead; the final one has the
    rest."""
    flow = of._flow if isinstance(of, Token2Wav) else of
    begins = list(accumulate(hops, initial=0))
    ends = [begin + hop + LOOKAHEAD_TOKENS for begin, hop in zip(begins, hops, strict=False)]
    return [
        Piece(tokens[0 if flow.cumulative else begin : end], final=end is None, offset=begin)
        for begin, end in zip(begins, [*ends, None], strict=True)
    ]


def mel(flow: StreamingFlow, voice: Prompt, tokens: np.ndarray, hops: list[int]) -> torch.Tensor:
    """The mel (80, T) of a stream in chunks of so many tokens, and a final one."""
    stream = flow.open(voice, VocoderState(0))
    parts = [flow.render([piece.of(flow, stream)])[0].clone() for piece in pieces(flow, tokens, hops)]
    flow.close(stream)
    return torch.cat(parts, dim=1)


def step(engine: Token2Wav, stream: Stream, piece: Piece) -> np.ndarray:
    (audio,) = engine.step([piece.of(engine, stream)])
    return audio


def spoken(engine: Token2Wav, voice: Prompt, pieces: Sequence[Piece]) -> np.ndarray:
    """The audio of a stream of its own."""
    stream = engine.open(voice)
    audio = np.concatenate([step(engine, stream, piece) for piece in pieces])
    engine.close(stream)
    return audio


class Plan(NamedTuple):
    """A stream that begins at a turn, and has a chunk in each turn from then on."""

    voice: Prompt
    pieces: Sequence[Piece]
    begin: int = 0


def together(
    engine: Token2Wav,
    plans: Sequence[Plan],
    step: Callable[[list[Chunk]], list[Any]] | None = None,
    before: Callable[[int, dict[int, Stream]], object] = lambda turn, streams: None,
) -> list[np.ndarray]:
    """The audio of streams whose chunks of a turn are one batch.

    step: renders the batch; the engine's if there is none. before: called before each turn with the live streams.
    """
    streams: dict[int, Stream] = {}
    audio: list[list[np.ndarray]] = [[] for _ in plans]
    for turn in range(max(plan.begin + len(plan.pieces) for plan in plans)):
        streams |= {row: engine.open(plan.voice) for row, plan in enumerate(plans) if plan.begin == turn}
        before(turn, streams)
        rows = list(streams)
        chunks = [plans[row].pieces[turn - plans[row].begin].of(engine, streams[row]) for row in rows]
        for row, result in zip(rows, (step or engine.step)(chunks), strict=True):
            audio[row].append(result)
            if turn + 1 == plans[row].begin + len(plans[row].pieces):
                engine.close(streams.pop(row))
    return [np.concatenate(parts) for parts in audio]


def saved(directory: Path, flow: Any, hift: torch.nn.Module) -> Path:
    """The directory, with flow.pt and hift.pt in the official layout."""
    state = flow.state_dict()
    torch.save(with_rotary(state, flow.config) if isinstance(flow, CosyVoice3Flow) else state, directory / "flow.pt")
    torch.save(split_weight_norm(hift.state_dict()), directory / "hift.pt")
    return directory


def overflowing(network: torch.nn.Module) -> torch.nn.Module:
    """The same function with values beyond float16 in its first attention."""
    network = copy.deepcopy(network)
    estimator: Any = network.get_submodule("decoder.estimator")
    rotary = hasattr(estimator, "transformer_blocks")
    attention = (estimator.transformer_blocks if rotary else estimator.blocks)[0].attn
    attention.to_v.weight *= 2.0**24
    attention.to_v.bias *= 2.0**24
    (attention.to_out[0] if rotary else attention.proj).weight *= 2.0**-24
    return network


def vocoded(vocoder: Any, mels: Sequence[torch.Tensor], schedules: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
    """The audio of each mel's (80, T) chunks of so many frames; the next chunks of all mels are one batch."""
    streams = [Stream(vocoder=vocoder.open()) for _ in mels]
    parts = [list(mel.split(list(hops), dim=1)) for mel, hops in zip(mels, schedules, strict=True)]
    audio: list[list[torch.Tensor]] = [[] for _ in mels]
    while live := [index for index, left in enumerate(parts) if left]:
        new = [parts[index].pop(0) for index in live]
        chunks = [Chunk(streams[index], np.zeros(0, np.int64), not parts[index], 0, 0, 0) for index in live]
        for index, speech in zip(live, vocoder.begin(chunks, new)(), strict=True):
            assert isinstance(speech, torch.Tensor)
            audio[index].append(speech)
    for stream in streams:
        vocoder.close(stream.vocoder)
    return audio
