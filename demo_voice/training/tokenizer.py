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
from cosyvoice_triton.constants import MEL_BINS, PROMPT_SAMPLE_RATE, SAMPLE_RATE, TOKEN_MEL_RATIO
from cosyvoice_triton.voice import features
from torch import Tensor, nn

from demo_voice.training.dataset import TOKEN_PHONES, TOKEN_SAMPLES, SpeechDataset
from demo_voice.training.features import as_recorded, at_speed, s3_log_mel
from demo_voice.training.flite import PHONES, VOICES
from demo_voice.training.qwen2 import Rotation, rotated, rotation
from demo_voice.training.training import (
    CapturedStep,
    TrainingRun,
    adamw,
    autocast,
    descend,
    exact_inference,
    prepare,
    rounded,
    trained,
)
from tests.random_weights.speech_tokenizer import (
    FSMN_KERNEL,
    HEAD_DIM,
    N_MELS,
    TRITS,
    write_speech_tokenizer,
)

logger = logging.getLogger(__name__)

FILE = "tokenizer.pt"
WIDTH, LAYERS = 128, 2
CROP_TOKENS, BATCH = 64, 64
# Tokens of speech resampled to the length of a crop; half of the crops at normal speed. Few shapes, and numbers with
# small factors for fast Fourier transforms.
PLAYED = (54, 56, 60, 64, 64, 64, 64, 70, 72, 75)
PEAK_RATE = 2e-3
MEL_MEAN, MEL_DEVIATION = -5.5, 2.5
MEL_WEIGHT = 0.5
PERTURBED = 0.6  # share of the rows
TOKENIZED_AT_ONCE = 40_000  # tokens


class S3Tokenizer(nn.Module):
    """S3 tokenizer v2 with the keys of package s3tokenizer, for batches of equal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _TokenizerEncoder()
        self.quantizer = _Quantizer()

    def forward(self, mel: Tensor) -> Tensor:
        """log mel (B, 128, T) -> codes before rounding (B, T / 4, 8) in -0.999..0.999"""
        return self.quantizer(self.encoder(mel))

    @staticmethod
    def ids(codes: Tensor) -> Tensor:
        """Codes (..., 8) -> token ids (...)"""
        powers = 3 ** torch.arange(TRITS, device=codes.device)
        return ((codes.round().long() + 1) * powers).sum(-1)


class _TokenizerEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(N_MELS, WIDTH, 3, 2, 1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, 2, 1)
        self.blocks = nn.ModuleList([_TokenizerBlock() for _ in range(LAYERS)])

    def forward(self, mel: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)  # (B, C, T) -> (B, T, C)
        turns = rotation(x.shape[1], HEAD_DIM, 10_000.0, x.device)
        for block in self.blocks:
            x = block(x, turns)
        return x


class _Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project_down = nn.Linear(WIDTH, TRITS)


class _Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._codebook = _Codebook()

    def forward(self, x: Tensor) -> Tensor:
        return 0.999 * self._codebook.project_down(x).float().tanh()


class _TokenizerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = _FSMNAttention()
        self.attn_ln = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.mlp_ln = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, turns: Rotation) -> Tensor:
        x = x + self.attn(self.attn_ln(x), turns)
        return x + self.mlp(self.mlp_ln(x))


class _FSMNAttention(nn.Module):
    """Attention plus a convolution over the values (FSMN memory)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fsmn_block = nn.Conv1d(WIDTH, WIDTH, FSMN_KERNEL, padding=FSMN_KERNEL // 2, groups=WIDTH, bias=False)

    def forward(self, x: Tensor, turns: Rotation) -> Tensor:
        B, T, _ = x.shape
        value = self.value(x)
        memory = value + self.fsmn_block(value.transpose(1, 2)).transpose(1, 2)
        query, key, heads = (
            y.view(B, T, -1, HEAD_DIM).transpose(1, 2) for y in (self.query(x), self.key(x), value)
        )  # (B, T, C) -> (B, H, T, D)
        mixed = F.scaled_dot_product_attention(rotated(query, turns), rotated(key, turns), heads)
        return self.out(mixed.transpose(1, 2).reshape(B, T, WIDTH)) + memory


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
    tokenizer, heads = S3Tokenizer().to(speech.device), TrainingHeads().to(speech.device)
    optimizer = adamw([*tokenizer.parameters(), *heads.parameters()], PEAK_RATE)
    run = TrainingRun(work / FILE, seconds, tokenizer, [optimizer])

    def train_step(played: int) -> dict[str, Tensor]:
        phones, mel, hits = _losses(tokenizer, heads, speech, played)
        descend(phones + MEL_WEIGHT * mel, optimizer, clip=1.0)
        return {"phones": phones.detach(), "mel": mel.detach(), "hits": hits}

    captured = CapturedStep(train_step, speech.device)
    for _ in run:
        run.losses(**captured(random.choice(PLAYED)))
    tokens = tokenize_utterances(load(work, speech.device), speech)
    np.save(work / "tokens.npy", tokens)
    share = np.bincount(tokens, minlength=3**TRITS) / len(tokens)
    bits = -(share * np.log2(np.maximum(share, 1e-12))).sum()
    logger.info("tokenizer: %d codes in use, entropy %.2f bits", (share > 0).sum(), bits)


def _losses(
    tokenizer: S3Tokenizer, heads: TrainingHeads, speech: SpeechDataset, taken: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of phones, absolute error of mel, and phone accuracy. taken: tokens played within the crop."""
    starts = speech.random_starts(BATCH, taken)
    samples = CROP_TOKENS * TOKEN_SAMPLES
    with torch.no_grad():
        clean = at_speed(speech.wave(starts, taken), samples)
        target = features.mel_spectrogram(features.resample(clean, PROMPT_SAMPLE_RATE, SAMPLE_RATE)).transpose(1, 2)
        target = (target - MEL_MEAN) / MEL_DEVIATION  # (B, 80, T) -> (B, T, 80)
        perturbed = torch.rand(BATCH, 1, device=speech.device) < PERTURBED
        mels = s3_log_mel(torch.where(perturbed, as_recorded(clean), clean))
        labels = speech.phones_of(starts, taken)
        positions = (torch.arange(CROP_TOKENS * TOKEN_PHONES, device=speech.device) + 0.5) * (taken / CROP_TOKENS)
        labels = labels[:, positions.long()]
    voice = speech.voices[speech.utterance_of(starts, taken)]
    with autocast(speech.device):
        codes = tokenizer(mels)
        rounded = codes + (codes.round() - codes).detach()
        phones, mel = heads(rounded, voice, taken / CROP_TOKENS)
    phones_loss = F.cross_entropy(phones.flatten(0, 1), labels.flatten())
    return phones_loss, (mel - target).abs().mean(), (phones.argmax(-1) == labels).float().mean()


def load(work: Path, device: str | torch.device) -> S3Tokenizer:
    """The trained tokenizer with weights rounded as in the export: matrices in half precision."""
    tokenizer = S3Tokenizer()
    tokenizer.load_state_dict(rounded(work / FILE))
    return tokenizer.to(device).eval()


def tokenize_utterances(tokenizer: S3Tokenizer, speech: SpeechDataset) -> np.ndarray:
    """Tokens (T,) int16 of the whole stream. Each utterance is tokenized on its own; equal lengths form batches."""
    tokens = torch.zeros(len(speech.owner), dtype=torch.int16, device=speech.device)
    with exact_inference():
        for length, members in speech.batches(TOKENIZED_AT_ONCE):
            starts = speech.starts[members]
            ids = tokenizer.ids(tokenizer(s3_log_mel(speech.wave(starts, length))))
            tokens[starts[:, None] + torch.arange(length, device=speech.device)] = ids.to(torch.int16)
    return tokens.cpu().numpy()


def export(work: Path, path: Path) -> None:
    """The trained tokenizer as an official ONNX file."""
    weights = {key: value.numpy() for key, value in trained(work / FILE).items()}
    write_speech_tokenizer(path, weights, "a small S3 tokenizer, trained on synthetic voices")
