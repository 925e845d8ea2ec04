"""Both flows: conditional flow matching on random crops, as they are served.

The network's own encoder and estimator are run as serving runs them: every other batch in the streaming form, with the
attention that a stream's chunks have, the others as whole utterances. Prompts are the first part of a crop; what
comes behind is spoken in its voice. Guidance needs an unconditional network, so conditions are left out at times.

Mel is not normalised, because the official flows' is not: the biases of the two output layers begin at its mean.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.constants import LOOKAHEAD_TOKENS, SPEECH_VOCAB, TOKEN_MEL_RATIO
from common.flow import DiTFlow, UNetFlow
from common.flow.dit import DiTEstimator
from common.voice import audio
from tools.voice_training.dataset import Speech
from tools.voice_training.resampling import upsampled
from tools.voice_training.training import Recorded, Run, adamw, autocast, descend, trained

CROP_TOKENS = (60, 100, 200, 400)  # up to 16 s: as long as a prompt and an utterance together
BATCH_TOKENS = 12_800
PEAK_RATE = 1.5e-3
SIGMA_MIN = 1e-6  # of the noise that is left at the end of the path
MEL_DEVIATION = 2.5  # of log mel: what losses are counted in
ENCODER_WEIGHT = 0.5  # of the encoder's own error
WITHOUT_CONDITIONS = 0.2
WITH_PROMPT = 0.6
LONGEST_PROMPT = 0.4  # share of the crop
ODD_PROMPT = 0.3  # share of prompts that are changed, as recordings by other microphones and people are
OTHER_UTTERANCE = 0.5  # share of rows whose x-vector is another utterance's, as a prompt's is
END_OF_UTTERANCE = 0.3  # share of rows with nothing ahead of their last token
ABSENT = -1
DIGITS, LEVELS = 8, 3  # of a token, as the tokenizer quantises it


@dataclass(frozen=True)
class Batch:
    """Crops of T tokens; the first `prompt` tokens of each are given as its prompt.

    tokens: (B, T + look-ahead), ABSENT where the utterance has ended. mel: (B, 80, 2T). condition: (B, 80, 2T), the
    prompt's mel, then zeros. embedding: (B, 192). prompt: (B,).
    """

    tokens: Tensor
    mel: Tensor
    condition: Tensor
    embedding: Tensor
    prompt: Tensor

    @property
    def ahead(self) -> Tensor:
        """Each token with those ahead of it, (B, T, 1 + look-ahead)."""
        return self.tokens.unfold(1, 1 + LOOKAHEAD_TOKENS, 1)


# (batch, streaming) -> tokens with those ahead (B, T, 1 + look-ahead), visible (B, T) as the encoder takes them, and
# the estimator's keywords: everything that depends on how a stack cuts its streams
View = Callable[[Batch, bool], tuple[Tensor, Tensor, dict]]


def fit(flow: DiTFlow | UNetFlow, view: View, path: Path, speech: Speech, seconds: float) -> None:
    """Train until the time is up; see `Run` for the file at `path`."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans every new shape of an attention anew
    device = speech.device
    begin(flow, speech)
    flow.to(device).requires_grad_(True)  # the embedding too, which is built frozen
    optimizer = adamw(flow.parameters(), PEAK_RATE)
    run = Run(path, seconds, {"network": flow}, [optimizer])

    def learn(tokens: int, streaming: bool) -> dict[str, Tensor]:
        matching, encoder = losses(flow, view, draw(speech, tokens), streaming)
        descend(matching + ENCODER_WEIGHT * encoder, optimizer, clip=1.0)
        return {"matching": matching.detach(), "encoder": encoder.detach()}

    recorded = Recorded(learn, device)
    lengths = [min(length, len(speech.owner) // 2) for length in CROP_TOKENS]
    for step, _ in enumerate(run):
        run.losses(**recorded(random.choice(lengths), step % 2 == 1))


def export(trained_path: Path, path: Path) -> None:
    """Trained weights to an official `flow.pt`, float16."""
    torch.save({name: tensor.half() for name, tensor in trained(trained_path).items()}, path)


@torch.no_grad()
def begin(flow: DiTFlow | UNetFlow, speech: Speech) -> None:
    """Starting points that save the first minutes: the mean mel, and neighbouring tokens with similar embeddings."""
    mean = mels(speech, speech.random_starts(64, CROP_TOKENS[0]), CROP_TOKENS[0]).mean((0, 2)).cpu()
    flow.encoder_proj.bias.copy_(mean)
    token = torch.arange(SPEECH_VOCAB)[:, None]
    digits = token // LEVELS ** torch.arange(DIGITS) % LEVELS - 1.0  # (vocabulary, digits) of -1, 0, 1
    table = flow.input_embedding.weight
    table.copy_(digits @ torch.randn(DIGITS, table.shape[1]) / math.sqrt(DIGITS) + 0.2 * torch.randn(table.shape))
    estimator = flow.decoder.estimator
    output = estimator.final_layer.linear if isinstance(estimator, DiTEstimator) else estimator.final_proj
    output.weight.zero_()
    output.bias = torch.nn.Parameter(mean.clone())


def losses(flow: DiTFlow | UNetFlow, view: View, batch: Batch, streaming: bool) -> tuple[Tensor, Tensor]:
    """Errors of the velocity (squared) and of the encoder's mel (absolute), in deviations of mel."""
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


def draw(speech: Speech, T: int) -> Batch:
    """Random crops of T tokens."""
    B, device = max(1, BATCH_TOKENS // T), speech.device

    def chance(share: float) -> Tensor:
        return torch.rand(B, device=device) < share

    starts = speech.random_starts(B, T + LOOKAHEAD_TOKENS)
    tokens = speech.tokens_of(starts, T + LOOKAHEAD_TOKENS)
    tokens[:, T:] = torch.where(chance(END_OF_UTTERANCE)[:, None], ABSENT, tokens[:, T:])
    mel = mels(speech, starts, T)
    prompt = (torch.rand(B, device=device) * LONGEST_PROMPT * T).long() * chance(WITH_PROMPT)
    inside = torch.arange(TOKEN_MEL_RATIO * T, device=device) < TOKEN_MEL_RATIO * prompt[:, None]  # (B, 2T)
    condition = torch.where(chance(ODD_PROMPT)[:, None, None], oddly_recorded(mel), mel) * inside[:, None]
    return Batch(tokens, mel, condition, embeddings(speech, speech.utterance_of(starts, T)), prompt)


def embeddings(speech: Speech, utterance: Tensor) -> Tensor:
    """X-vectors (B, 192) that fit the utterances (B,): their own or another's of the voice, with some noise."""
    device, voice = speech.device, speech.voices[utterance]
    first = torch.searchsorted(speech.voices.contiguous(), voice)
    count = torch.searchsorted(speech.voices.contiguous(), voice, right=True) - first
    other = first + (torch.rand(len(voice), device=device) * count).long()
    chosen = torch.where(torch.rand(len(voice), device=device) < OTHER_UTTERANCE, other, utterance)
    vectors = F.normalize(speech.speakers[chosen], dim=1)
    return vectors + 0.2 * torch.rand(len(voice), 1, device=device) * F.normalize(torch.randn_like(vectors), dim=1)


def oddly_recorded(mel: Tensor) -> Tensor:
    """Log mel (B, 80, T) as of another gain, another tone and a noisy room; the voice moved up or down by a band or so.

    So that a recording of a human is less of a surprise.
    """
    B, bins, _ = mel.shape

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(B, 1, 1, device=mel.device)

    band = torch.linspace(-1, 1, bins, device=mel.device)[:, None]
    shift = (torch.arange(bins, device=mel.device)[None] * between(0.93, 1.07)[:, 0]).round().long().clamp(max=bins - 1)
    moved = mel.gather(1, shift[:, :, None].expand_as(mel))
    return torch.logaddexp(moved + between(-1.5, 1.5) + between(-1, 1) * band, between(-12, -6).expand_as(mel))


def mels(speech: Speech, starts: Tensor, length: int) -> Tensor:
    """Mel (B, 80, 2 * length) of crops, computed as a prompt's is."""
    return audio.mel_spectrogram(upsampled(speech.wave(starts, length)))
