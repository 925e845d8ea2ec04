"""Training of the flows: conditional flow matching on random crops, with the attention masks of serving.

Encoder and estimator run as in serving: every other batch in the streaming form, with the attention of a stream's
chunks, the others as whole utterances. The first part of a crop is the prompt; the rest is to be rendered in its voice.
Classifier-free guidance needs an unconditional network, so conditions are dropped for some rows.

Mel is not normalised, as in the official flows: output biases, and CosyVoice3's token embeddings, begin at its mean.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, SPEECH_VOCAB, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow import CosyVoice3Flow, DiTFlow, UNetFlow
from cosyvoice_triton.networks.flow.dit import DiTEstimator
from cosyvoice_triton.voice import features
from torch import Tensor

from demo_voice.training.dataset import SpeechDataset
from demo_voice.training.training import CapturedStep, TrainingRun, adamw, autocast, descend, trained

CROP_TOKENS = (60, 100, 200, 400)  # up to 16 s: as long as a prompt and an utterance together
BATCH_TOKENS = 12_800
PEAK_RATE = 1.5e-3
SIGMA_MIN = 1e-6  # standard deviation of the noise left at the end of the path
MEL_DEVIATION = 2.5  # standard deviation of log mel, the unit of the losses
ENCODER_WEIGHT = 0.5  # weight of the encoder's own loss
WITHOUT_CONDITIONS = 0.2  # share of rows
WITH_PROMPT = 0.85  # share of rows: most words that a stream gets wrong are its first ones, after the prompt
LONGEST_PROMPT = 0.4  # share of the crop
PERTURBED_PROMPT = 0.3  # share of prompts that are perturbed, to resemble recordings by other microphones and people
OTHER_UTTERANCE = 0.5  # share of rows whose x-vector is of another utterance, as in serving
END_OF_UTTERANCE = 0.3  # share of rows without tokens ahead of their last one
ABSENT = -1
# adaLN-Zero, of the two DiTs: gates start at zero, so that every block starts as the identity.
MODULATION = re.compile(r"adaLN_modulation|attn_norm\.|norm_out\.")
DIGITS, LEVELS = 8, 3  # digits of a token in the tokenizer's quantiser, and values of each


@dataclass(frozen=True)
class Batch:
    """Crops of T tokens; the first `prompt` tokens of each are its prompt.

    tokens: (B, T + look-ahead), ABSENT after the end of the utterance. mel: (B, 80, 2T). condition: (B, 80, 2T), the
    prompt's mel, then zeros. embedding: (B, 192). prompt: (B,).
    """

    tokens: Tensor
    mel: Tensor
    condition: Tensor
    embedding: Tensor
    prompt: Tensor

    @property
    def ahead(self) -> Tensor:
        """Each token followed by the tokens ahead of it, (B, T, 1 + look-ahead)."""
        return self.tokens.unfold(1, 1 + LOOKAHEAD_TOKENS, 1)


# (batch, streaming) -> the encoder's tokens (B, T, 1 + look-ahead) and visible (B, T), and the estimator's mask
# arguments: everything that depends on how a stack divides its streams into chunks
View = Callable[[Batch, bool], tuple[Tensor, Tensor, dict]]
Flow = DiTFlow | UNetFlow | CosyVoice3Flow


def fit(
    flow: Flow, view: View, path: Path, speech: SpeechDataset, seconds: float, max_hz: float = features.MelConfig.max_hz
) -> None:
    """Train for `seconds`; see `TrainingRun` for the file at `path`. max_hz: upper limit of the mel."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for every shape
    device = speech.device
    initialize(flow, speech, max_hz)
    flow.to(device).requires_grad_(True)  # also the embedding, which is created frozen
    optimizer = adamw(flow.parameters(), PEAK_RATE)
    run = TrainingRun(path, seconds, flow, optimizer)

    def train_step(tokens: int, streaming: bool) -> dict[str, Tensor]:
        matching, encoder = losses(flow, view, random_crops(speech, tokens, max_hz), streaming)
        descend(matching + ENCODER_WEIGHT * encoder, optimizer, clip=1.0)
        return {"matching": matching.detach(), "encoder": encoder.detach()}

    captured = CapturedStep(train_step, device)
    lengths = [min(length, len(speech.owner) // 2) for length in CROP_TOKENS]
    for step, _ in enumerate(run):
        run.losses(**captured(random.choice(lengths), step % 2 == 1))


@lru_cache
def hop_table(schedules: tuple[tuple[int, ...], ...], tokens: int, device: torch.device) -> Tensor:
    """(schedules, 2, tokens): begin and end of the hop of every token, in streams with hops of these lengths."""
    rows = []
    for hops in schedules:
        of_token = [(end - hop, end) for hop, end in zip(hops, accumulate(hops), strict=True) for _ in range(hop)]
        rows.append([*zip(*of_token[:tokens], strict=True)])
    return torch.tensor(rows, device=device)


def export(file: str, work: Path, path: Path) -> None:
    """The trained network in `work` as an official `flow.pt`, float16."""
    torch.save({name: tensor.half() for name, tensor in trained(work / file).items()}, path)


@torch.no_grad()
def initialize(flow: Flow, speech: SpeechDataset, max_hz: float) -> None:
    """Initial values that save minutes: mean mel as output biases, similar embeddings for tokens that share digits."""
    mean = mels(speech, speech.random_starts(64, CROP_TOKENS[0]), CROP_TOKENS[0], max_hz).mean((0, 2)).cpu()
    token = torch.arange(SPEECH_VOCAB)[:, None]
    digits = token // LEVELS ** torch.arange(DIGITS) % LEVELS - 1.0  # (vocabulary, digits) of -1, 0, 1
    table = flow.input_embedding.weight
    table.copy_(digits @ torch.randn(DIGITS, table.shape[1]) / math.sqrt(DIGITS) + 0.2 * torch.randn(table.shape))
    if isinstance(flow, CosyVoice3Flow):
        table.add_(mean)
    else:
        flow.encoder_proj.bias.copy_(mean)
    estimator: Any = flow.decoder.estimator
    if isinstance(estimator, DiTEstimator):
        output = estimator.final_layer.linear
    else:
        output = estimator.final_proj if isinstance(flow, UNetFlow) else estimator.proj_out
    output.weight.zero_()
    output.bias = torch.nn.Parameter(mean.clone())
    for name, parameter in estimator.named_parameters():
        if MODULATION.search(name):
            parameter.zero_()


def losses(flow: Flow, view: View, batch: Batch, streaming: bool) -> tuple[Tensor, Tensor]:
    """Squared error of the velocity and absolute error of the encoder's mel, in units of MEL_DEVIATION."""
    target, device = batch.mel, batch.mel.device
    B = len(target)
    ahead, visible, estimator_mask = view(batch, streaming)
    time = 1 - torch.cos(0.5 * torch.pi * torch.rand(B, device=device))
    noise = torch.randn_like(target)
    along = time[:, None, None]
    noisy = (1 - (1 - SIGMA_MIN) * along) * noise + along * target
    kept = (torch.rand(B, device=device) >= WITHOUT_CONDITIONS).float()
    with autocast(device):
        mu = flow.encode_window(ahead, visible).transpose(1, 2).float()  # (B, T, mel) -> (B, mel, T)
        speaker = flow.project_speaker(batch.embedding)
        conditions = (mu * kept[:, None, None], speaker * kept[:, None], batch.condition * kept[:, None, None])
        velocity = flow.decoder.estimator(noisy, time, *conditions, **estimator_mask).float()
    matching = (velocity - (target - (1 - SIGMA_MIN) * noise)).square().mean() / MEL_DEVIATION**2
    return matching, (mu - target).abs().mean() / MEL_DEVIATION


def random_crops(speech: SpeechDataset, T: int, max_hz: float) -> Batch:
    """Random crops of T tokens."""
    B, device = max(1, BATCH_TOKENS // T), speech.device

    def chance(share: float) -> Tensor:
        return torch.rand(B, device=device) < share

    starts = speech.random_starts(B, T + LOOKAHEAD_TOKENS)
    tokens = speech.tokens_of(starts, T + LOOKAHEAD_TOKENS)
    tokens[:, T:] = torch.where(chance(END_OF_UTTERANCE)[:, None], ABSENT, tokens[:, T:])
    mel = mels(speech, starts, T, max_hz)
    prompt = (torch.rand(B, device=device) * LONGEST_PROMPT * T).long() * chance(WITH_PROMPT)
    inside = torch.arange(TOKEN_MEL_RATIO * T, device=device) < TOKEN_MEL_RATIO * prompt[:, None]  # (B, 2T)
    condition = torch.where(chance(PERTURBED_PROMPT)[:, None, None], perturbed_mel(mel), mel) * inside[:, None]
    return Batch(tokens, mel, condition, embeddings(speech, speech.utterance_of(starts, T)), prompt)


def embeddings(speech: SpeechDataset, utterance: Tensor) -> Tensor:
    """x-vectors (B, 192) for utterances (B,): their own or another of the same voice, with some noise."""
    device, voice = speech.device, speech.voices[utterance]
    chosen = torch.where(torch.rand(len(voice), device=device) < OTHER_UTTERANCE, speech.others_of(voice), utterance)
    vectors = F.normalize(speech.speakers[chosen], dim=1)
    return vectors + 0.2 * torch.rand(len(voice), 1, device=device) * F.normalize(torch.randn_like(vectors), dim=1)


def perturbed_mel(mel: Tensor) -> Tensor:
    """Log mel (B, 80, T) with another gain, spectral tilt, background noise and a shift by a few bands.

    It makes the flow robust to recordings of humans, which it is not trained on.
    """
    B, bins, _ = mel.shape

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(B, 1, 1, device=mel.device)

    band = torch.linspace(-1, 1, bins, device=mel.device)[:, None]
    shift = (torch.arange(bins, device=mel.device)[None] * between(0.93, 1.07)[:, 0]).round().long().clamp(max=bins - 1)
    moved = mel.gather(1, shift[:, :, None].expand_as(mel))
    return torch.logaddexp(moved + between(-1.5, 1.5) + between(-1, 1) * band, between(-12, -6).expand_as(mel))


def mels(speech: SpeechDataset, starts: Tensor, length: int, max_hz: float) -> Tensor:
    """Log mel (B, 80, 2 * length) of crops, computed like a prompt's."""
    return features.mel_spectrogram(speech.wave(starts, length), features.MelConfig(max_hz=max_hz))
