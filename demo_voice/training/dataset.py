"""The synthesised speech of a working folder, held on one device: random crops and single utterances.

All utterances are one stream, each padded to whole speech tokens, so that a crop is a slice at any token, without
padding or masks. Files, for T tokens and U utterances:

    audio.npy       (T * 960,) int16     24 kHz
    phones.npy      (T * 4,) uint8       phones at 100 Hz, see phonemes.PHONES
    utterances.npy  (U, 3) int64         line of sentences.txt, voice (see kokoro.VOICES), tokens; grouped by voice
    tokens.npy      (T,) int16           speech tokens, from stage `tokenizer`
    speakers.npy    (U, 192) float32     x-vectors, from stage `speaker`
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_RATE
from torch import Tensor
from tqdm import tqdm

TOKEN_SAMPLES = SAMPLE_RATE // TOKEN_RATE  # 960 samples of 24 kHz
TOKEN_PHONES = 4  # phone labels per token
INT16_SCALE = 1 / 32768


@dataclass(frozen=True)
class SpeechDataset:
    """The arrays as tensors on `device`; those of the two later stages are read at first use.

    starts (U,): first token of each utterance; owner (T,): utterance of each token.
    """

    work: Path
    device: torch.device
    audio: Tensor
    phones: Tensor
    utterances: Tensor
    starts: Tensor
    owner: Tensor

    @classmethod
    def load(cls, work: Path, device: str | torch.device) -> "SpeechDataset":
        def read(name: str) -> Tensor:
            return torch.from_numpy(np.load(work / name)).to(device)

        utterances = read("utterances.npy")
        lengths = utterances[:, 2]
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        starts = lengths.cumsum(0) - lengths
        return cls(work, torch.device(device), read("audio.npy"), read("phones.npy"), utterances, starts, owner)

    @cached_property
    def tokens(self) -> Tensor:
        """Speech tokens (T,) int64."""
        return torch.from_numpy(np.load(self.work / "tokens.npy").astype(np.int64)).to(self.device)

    @cached_property
    def speakers(self) -> Tensor:
        """x-vectors (U, 192), not normalised, as campplus.onnx returns them."""
        return torch.from_numpy(np.load(self.work / "speakers.npy")).to(self.device)

    @property
    def voices(self) -> Tensor:
        """Voice of each utterance, (U,)."""
        return self.utterances[:, 1]

    def others_of(self, voice: Tensor) -> Tensor:
        """A random utterance (B,) of each voice (B,)."""
        of_voice = self.voices.contiguous()
        first, end = (torch.searchsorted(of_voice, voice, right=right) for right in (False, True))
        return first + (torch.rand(len(voice), device=self.device) * (end - first)).long()

    def random_starts(self, batch: int, length: int) -> Tensor:
        """First tokens (batch,) of random crops of `length` tokens, which may cross ends of utterances.

        A crop that would reach into another voice is moved back to end with its own.
        """
        starts = torch.randint(0, len(self.owner) - length + 1, (batch,), device=self.device)
        voice = self.voices[self.owner[starts]]
        ends = self._voice_ends[voice]
        return torch.minimum(starts, ends - length).clamp(min=0)

    @cached_property
    def voice_count(self) -> int:
        return int(self.voices.max()) + 1

    @cached_property
    def _voice_ends(self) -> Tensor:
        """Index of the token after the last one of each voice, (voices,)."""
        lengths = torch.zeros(self.voice_count, dtype=torch.int64, device=self.device)
        return lengths.index_add(0, self.voices, self.utterances[:, 2]).cumsum(0)

    def wave(self, starts: Tensor, length: int) -> Tensor:
        """24 kHz waves (B, length * 960) float32 of `length` tokens each, from the tokens `starts` (B,) on."""
        return _slices(self.audio, starts * TOKEN_SAMPLES, length * TOKEN_SAMPLES).float() * INT16_SCALE

    def phones_of(self, starts: Tensor, length: int) -> Tensor:
        """Phones (B, length * 4) int64."""
        return _slices(self.phones, starts * TOKEN_PHONES, length * TOKEN_PHONES).long()

    def tokens_of(self, starts: Tensor, length: int) -> Tensor:
        """Speech tokens (B, length) int64."""
        return _slices(self.tokens, starts, length)

    def utterance_of(self, starts: Tensor, length: int) -> Tensor:
        """Index (B,) of the utterance in the middle of each crop."""
        return self.owner[starts + length // 2]


def by_length(lengths: Tensor, chosen: Tensor, most_tokens: int) -> Iterator[tuple[int, Tensor]]:
    """Batches of the chosen utterances, whose lengths in tokens are equal: the length, and which utterances."""
    for length in tqdm(lengths[chosen].unique().tolist(), desc="utterances", unit="length", mininterval=5):
        for members in chosen[lengths[chosen] == length].split(max(1, most_tokens // length)):
            yield length, members


def _slices(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """stream[start : start + length] for each start, (B, length)"""
    return stream[starts[:, None] + torch.arange(length, device=stream.device)]
