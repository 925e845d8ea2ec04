"""Stage `tokenizer`: a small S3 tokenizer v2, trained to encode phones and intonation robustly.

Codes are rounded in the forward pass, with a straight-through gradient. Two heads, for training only, predict phones
(100 Hz) and mel from the codes; the mel head also gets voice and speed, so that codes need not carry them. The input is
perturbed (speed, gain, tone, noise) and the target mel is not, so that recordings of people get sensible codes.
"""

import logging
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cosyvoice_triton.constants import MEL_BINS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.speech_tokenizer import SpeechTokenizer, token_ids
from cosyvoice_triton.voice import features
from torch import Tensor, nn

from demo_voice.training.dataset import INT16_SCALE, TOKEN_PHONES, TOKEN_SAMPLES, SpeechDataset, by_length
from demo_voice.training.features import FASTEST, SLOWEST, as_recorded, at_speed, recorded
from demo_voice.training.kokoro import VOICES
from demo_voice.training.phonemes import PHONES
from demo_voice.training.training import (
    CapturedStep,
    TrainingRun,
    adamw,
    autocast,
    descend,
    exact_inference,
    prepare,
    rounded,
)
from tests.random_weights.speech_tokenizer import N_MELS, TRITS, write_speech_tokenizer

logger = logging.getLogger(__name__)

FILE = "tokenizer.pt"
WIDTH, LAYERS = 128, 6
CROP_TOKENS, BATCH = 64, 64
# Tokens of speech resampled to the length of a crop; half of the crops at normal speed. Few shapes, and numbers with
# small factors for fast Fourier transforms.
PLAYED = (54, 56, 60, 64, 64, 64, 64, 70, 72, 75)
PEAK_RATE = 2e-3
MEL_MEAN, MEL_DEVIATION = -5.5, 2.5
MEL_WEIGHT = 0.5
PERTURBED = 0.6  # share of the rows
TOKENIZED_AT_ONCE = 40_000  # tokens


class TrainingHeads(nn.Module):
    """Phones and mel predicted from codes, for training only."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(TRITS, width)
        self.convs = nn.ModuleList([nn.Conv1d(width, width, 5, padding=2) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.voice = nn.Embedding(len(VOICES), width)
        self.speed = nn.Linear(1, width)
        self.phones = nn.Linear(width, TOKEN_PHONES * len(PHONES))
        self.mel = nn.Linear(width, TOKEN_MEL_RATIO * MEL_BINS)

    def forward(self, codes: Tensor, voice: Tensor, speed: float) -> tuple[Tensor, Tensor]:
        """codes (B, T, 8), voice (B,) -> logits (B, 4T, phones), normalised mel (B, 2T, 80)"""
        B, T, _ = codes.shape
        x = self.enter(codes)
        manner = self.voice(voice) + self.speed(x.new_full((1, 1), speed - 1))
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if index == len(self.convs) // 2:
                phones = self.phones(x).view(B, T * TOKEN_PHONES, len(PHONES)).float()
                x = x + manner[:, None]
            x = x + F.gelu(conv(norm(x).transpose(1, 2))).transpose(1, 2)
        return phones, self.mel(x).view(B, T * TOKEN_MEL_RATIO, MEL_BINS).float()


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    """Write tokenizer.pt, then tokens.npy."""
    speech = SpeechDataset.load(work, prepare(device, seed=3))
    tokenizer, heads = SpeechTokenizer(N_MELS, WIDTH, LAYERS).to(speech.device), TrainingHeads().to(speech.device)
    optimizer = adamw([*tokenizer.parameters(), *heads.parameters()], PEAK_RATE)
    run = TrainingRun(work / FILE, seconds, tokenizer, optimizer)

    def train_step(played: int) -> dict[str, Tensor]:
        phones, mel, hits = _losses(tokenizer, heads, speech, played)
        descend(phones + MEL_WEIGHT * mel, optimizer, clip=1.0)
        return {"phones": phones.detach(), "mel": mel.detach(), "hits": hits}

    captured = CapturedStep(train_step, speech.device)
    for _ in run:
        run.losses(**captured(random.choice(PLAYED)))
    everyone = torch.arange(len(speech.starts), device=speech.device)
    lengths = speech.utterances[:, 2]
    tokens = np.concatenate(tokenize(load(work, speech.device), speech.audio, lengths, everyone))
    np.save(work / "tokens.npy", tokens.astype(np.int16))
    share = np.bincount(tokens, minlength=3**TRITS) / len(tokens)
    bits = -(share * np.log2(np.maximum(share, 1e-12))).sum()
    logger.info("tokenizer: %d codes in use, entropy %.2f bits", (share > 0).sum(), bits)


def _losses(
    tokenizer: SpeechTokenizer, heads: TrainingHeads, speech: SpeechDataset, taken: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of phones, absolute error of mel, and phone accuracy. taken: tokens played within the crop."""
    starts = speech.random_starts(BATCH, taken)
    samples = CROP_TOKENS * TOKEN_SAMPLES
    with torch.no_grad():
        clean = at_speed(speech.wave(starts, taken), samples)
        target = features.mel_spectrogram(clean).transpose(1, 2)
        target = (target - MEL_MEAN) / MEL_DEVIATION  # (B, 80, T) -> (B, T, 80)
        perturbed = torch.rand(BATCH, 1, device=speech.device) < PERTURBED
        mels = features.log_mel(recorded(torch.where(perturbed, as_recorded(clean), clean)))
        labels = speech.phones_of(starts, taken)
        positions = (torch.arange(CROP_TOKENS * TOKEN_PHONES, device=speech.device) + 0.5) * (taken / CROP_TOKENS)
        labels = labels[:, positions.long()]
    voice = speech.voices[speech.utterance_of(starts, taken)]
    with autocast(speech.device):
        codes = tokenizer.codes(mels)
        rounded = codes + (codes.round() - codes).detach()
        phones, mel = heads(rounded, voice, taken / CROP_TOKENS)
    phones_loss = F.cross_entropy(phones.flatten(0, 1), labels.flatten())
    return phones_loss, (mel - target).abs().mean(), (phones.argmax(-1) == labels).float().mean()


def load(work: Path, device: str | torch.device) -> SpeechTokenizer:
    """The trained tokenizer with weights rounded as in the export: matrices in half precision."""
    tokenizer = SpeechTokenizer(N_MELS, WIDTH, LAYERS)
    tokenizer.load_state_dict(rounded(work / FILE))
    return tokenizer.to(device).eval()


def tokenize(
    tokenizer: SpeechTokenizer, audio: Tensor, lengths: Tensor, chosen: Tensor, *, perturbed: bool = False
) -> list[np.ndarray]:
    """Tokens (n,) int32 of the chosen ones of the utterances in a stream (N,) int16, whose `lengths` are in tokens;
    none of the others. perturbed: of other recordings of them. Each is tokenized on its own; equal lengths form
    batches."""
    rows, starts = audio.view(-1, TOKEN_SAMPLES), lengths.cumsum(0) - lengths
    tokens = [np.empty(0, np.int32)] * len(lengths)
    with exact_inference():
        for length, members in by_length(lengths, chosen, TOKENIZED_AT_ONCE):
            positions = starts[members, None] + torch.arange(length, device=rows.device)
            wave = rows[positions].flatten(1).float() * INT16_SCALE
            if perturbed:
                speed = SLOWEST * (FASTEST / SLOWEST) ** float(torch.rand(()))
                wave = as_recorded(at_speed(wave, round(length / speed) * TOKEN_SAMPLES))
            found = token_ids(tokenizer.codes(features.log_mel(recorded(wave)))).int().cpu().numpy()
            for u, ids in zip(members.tolist(), found, strict=True):
                tokens[u] = ids
    return tokens


def export(work: Path, path: Path) -> None:
    """The trained tokenizer as an official ONNX file."""
    weights = {key: value.numpy() for key, value in rounded(work / FILE).items()}
    write_speech_tokenizer(path, weights, "a small S3 tokenizer, trained on synthetic voices")
