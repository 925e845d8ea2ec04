"""Stage `speaker`: a small speaker encoder, trained as a classifier of voices at several speeds.

A voice played faster counts as another voice: the classes are the synthetic voices at several speeds each, which gives
a variety of voices. Inputs are perturbed, so that embeddings do not depend on gain, tone and noise.
"""

import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cosyvoice_triton.constants import MEL_BINS, SPEAKER_DIM
from torch import Tensor, nn

from demo_voice.training.dataset import TOKEN_SAMPLES, SpeechDataset, by_length
from demo_voice.training.features import as_recorded, at_speed, kaldi_fbank, recorded
from demo_voice.training.kokoro import VOICES
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
from tests.random_weights.speaker import write_campplus

FILE = "speaker.pt"
CHANNELS = 96
KERNELS = (5, 3, 3)  # convolution i has dilation i + 1
CROPS = (32, 80)  # tokens
SPEEDS = (0.85, 0.9, 0.95, 1.0, 1.06, 1.12, 1.2)
ROWS = 18  # rows of a batch per speed
PEAK_RATE = 2e-3
SHARPNESS, MARGIN = 16.0, 0.15  # scale and additive margin of the logits, which are cosines
EMBEDDED_AT_ONCE = 60_000  # tokens
PERTURBED = 0.6


class DemoSpeakerEncoder(nn.Module):
    """Filter bank (B, T, 80) -> x-vector (B, 192); `tests.random_weights.speaker` writes the same
    network as ONNX."""

    def __init__(self) -> None:
        super().__init__()
        widths = (MEL_BINS, *[CHANNELS] * len(KERNELS))
        convs = [
            nn.Conv1d(widths[i], widths[i + 1], kernel, dilation=i + 1, padding=kernel // 2 * (i + 1))
            for i, kernel in enumerate(KERNELS)
        ]
        with torch.no_grad():
            convs[0].weight *= 0.3  # log mel has a standard deviation of 4; keep it in tanh's range
        self.convs = nn.ModuleList(convs)
        self.project = nn.Linear(2 * CHANNELS, SPEAKER_DIM)

    def forward(self, features: Tensor) -> Tensor:
        x = features.transpose(1, 2)  # (B, T, 80) -> (B, 80, T)
        for conv in self.convs:
            x = torch.tanh(conv(x))
        x = x.float()
        spread = (x.var(-1, unbiased=False) + 1e-6).sqrt()
        return self.project(torch.cat([x.mean(-1), spread], dim=-1))


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    """Write speaker.pt, then speakers.npy."""
    speech = SpeechDataset.load(work, prepare(device, seed=4))
    network = DemoSpeakerEncoder().to(speech.device)
    classes = nn.Linear(SPEAKER_DIM, len(VOICES) * len(SPEEDS), bias=False).to(speech.device)
    optimizer = adamw([*network.parameters(), *classes.parameters()], PEAK_RATE)
    run = TrainingRun(work / FILE, seconds, network, optimizer)

    def train_step(crop: int) -> dict[str, Tensor]:
        features, target = _random_crops(speech, crop)
        with autocast(speech.device):
            embedding = network(features)
        cosine = F.normalize(embedding.float(), dim=1) @ F.normalize(classes.weight, dim=1).T
        margin = MARGIN * F.one_hot(target, cosine.shape[1])
        # The length of an embedding has no meaning; keep it near that of official ones.
        length = (embedding.norm(dim=1) / math.sqrt(SPEAKER_DIM) - 1).square().mean()
        loss = F.cross_entropy(SHARPNESS * (cosine - margin), target)
        descend(loss + 0.1 * length, optimizer, clip=1.0)
        return {"classes": loss.detach(), "hits": (cosine.argmax(1) == target).float().mean()}

    captured = CapturedStep(train_step, speech.device)
    for _ in run:
        run.losses(**captured(random.choice(CROPS)))
    np.save(work / "speakers.npy", embed_utterances(load(work, speech.device), speech))


def _random_crops(speech: SpeechDataset, crop: int) -> tuple[Tensor, Tensor]:
    """Features (B, T, 80) of crops and their classes (B,): all voices equally often, at every speed."""
    rows = len(SPEEDS) * ROWS
    voice = torch.randint(speech.voice_count, (rows,), device=speech.device)
    waves = []
    for speed, chosen in zip(SPEEDS, speech.others_of(voice).split(ROWS), strict=True):
        played = round(crop * speed)
        starts = speech.starts[chosen].clamp(max=len(speech.owner) - played)
        waves.append(at_speed(speech.wave(starts, played), crop * TOKEN_SAMPLES))
    wave = recorded(torch.cat(waves))
    perturbed = torch.rand(rows, 1, device=speech.device) < PERTURBED
    level = torch.arange(rows, device=speech.device) // ROWS
    return kaldi_fbank(torch.where(perturbed, as_recorded(wave), wave)), voice * len(SPEEDS) + level


def load(work: Path, device: str | torch.device) -> DemoSpeakerEncoder:
    """The trained network with weights rounded as in the export: matrices in half precision."""
    network = DemoSpeakerEncoder()
    network.load_state_dict(rounded(work / FILE))
    return network.to(device).eval()


def embed_utterances(network: DemoSpeakerEncoder, speech: SpeechDataset) -> np.ndarray:
    """x-vectors (U, 192) of all utterances."""
    vectors = torch.zeros(len(speech.starts), SPEAKER_DIM, device=speech.device)
    with exact_inference():
        everyone = torch.arange(len(speech.starts), device=speech.device)
        for length, members in by_length(speech.utterances[:, 2], everyone, EMBEDDED_AT_ONCE):
            vectors[members] = network(kaldi_fbank(recorded(speech.wave(speech.starts[members], length))))
    return vectors.cpu().numpy()


def export(work: Path, path: Path) -> None:
    """The trained network as an ONNX file with CAM++'s interface."""
    weights = {key: value.numpy() for key, value in trained(work / FILE).items()}
    write_campplus(path, weights, "a small speaker encoder in CAM++'s interface, trained on synthetic voices")
