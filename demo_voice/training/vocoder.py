"""Stage `vocoder`: HiFT, one network for the stacks `dit` and `unet`; `vocoder_causal` trains CosyVoice3's with it.

The generator is trained with the pitch found by autocorrelation, the f0 predictor with a loss of its own; later, half
of the rows use the predicted pitch, as serving does. The discriminators start in the second part: before, the output is
too poor for them to be of use.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from cosyvoice_triton.constants import HOP_SAMPLES, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.hift import HiFTConfig, HiFTGenerator, split_weight_norm
from cosyvoice_triton.networks.hift.generator import Snake
from cosyvoice_triton.voice import features
from torch import Tensor, nn

from demo_voice.training.dataset import SpeechDataset
from demo_voice.training.discriminators import Discriminators
from demo_voice.training.pitch import fundamental
from demo_voice.training.training import CapturedStep, TrainingRun, adamw, autocast, descend, prepare, trained

CONFIG = HiFTConfig(channels=192, f0_channels=96, resblock_kernels=(3, 5, 7), source_resblock_kernels=(3, 3, 5))
FILE = "hift.pt"
CROP_TOKENS, MARGIN_TOKENS, BATCH = 12, 2, 16  # the margin on both sides is context for mel and pitch
PEAK_RATE, DISCRIMINATOR_RATE, PITCH_RATE = 5e-4, 4e-4, 1e-3  # 1.5e-3 diverged after a thousand steps
BETAS = (0.8, 0.99)
HERTZ_RATE = 100  # the f0 predictor's last layer outputs Hz: its weights, and their rate, are larger by this factor
ADVERSARIAL_FROM = 0.15  # share of the time after which discriminators are used
PREDICTED_PITCH_FROM = 0.3  # share of the time after which half of the rows use the predicted pitch
RESOLUTIONS = ((128, 32), (512, 128), (1024, 256), (2048, 512))  # windows and hops
MEL_WEIGHT, ADVERSARIAL_WEIGHT, MATCHING_WEIGHT = 3.0, 0.5, 0.25
# Floors below which log magnitudes are clamped. Otherwise pauses would weigh as much in log distances as speech.
QUIETEST, QUIETEST_MEL = 1e-5, -9.0  # magnitude per sample of a window; log mel
PITCH_SCALE = 50.0  # Hz; an error of this size is a loss of 1


def _snake(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin(alpha x)^2 / alpha of x (B, C, T), alpha (C, 1)."""
    return x + torch.sin(alpha * x).square() / alpha


def _snake_gradients(x: Tensor, alpha: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """By x and alpha. sin^2 = (1 - cos(2 alpha x)) / 2, whose derivative by x is alpha sin(2 alpha x)."""
    angle = 2 * alpha * x
    slope = gradient * torch.sin(angle)
    of_alpha = (slope * x - 0.5 * gradient * (1 - torch.cos(angle)) / alpha).sum((0, 2))
    return gradient + slope, of_alpha[:, None] / alpha


@lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


class _SnakeFunction(torch.autograd.Function):
    """The snake in one kernel on a GPU, and its gradients: as single operations they are a third of a step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha)
        return (_compiled(_snake) if x.is_cuda else _snake)(x, alpha)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, alpha = ctx.saved_tensors
        return (_compiled(_snake_gradients) if x.is_cuda else _snake_gradients)(x, alpha, *gradients)


class TrainedSnake(Snake):
    """`Snake` with gradients, which the GPU kernel does not have."""

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        return _SnakeFunction.apply(x, self.alpha[:, None] + 1e-9)


@dataclass(frozen=True)
class Vocoder:
    """What differs between the vocoders.

    file: of the trained weights. network: made from its sizes. pitch: predicts f0 (B, T) in Hz from mel (B, 80, T).
    render: mel (B, 80, T), f0 (B, T) in Hz -> waves (B, N). max_hz: upper limit of the mel.
    """

    file: str
    network: Callable[[HiFTConfig], Any]
    pitch: Callable[[Any, Tensor], Tensor]
    render: Callable[[Any, Tensor, Tensor], Tensor]
    max_hz: float = features.MelConfig.max_hz


def build(vocoder: Vocoder) -> Any:
    """The network for training, with the same state_dict as the served one."""
    # Samples clamped at the limit would have no gradient.
    hift = vocoder.network(replace(CONFIG, audio_limit=math.inf))
    for module in list(hift.modules()):
        for name, child in module.named_children():
            if isinstance(child, Snake):
                module.register_module(name, TrainedSnake(len(child.alpha)))
    return hift


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    fit(HIFT, work, SpeechDataset.load(work, prepare(device, seed=3)), seconds)


def fit(vocoder: Vocoder, work: Path, speech: SpeechDataset, seconds: float) -> None:
    """Train for `seconds`; see `TrainingRun` for the file in `work`."""
    training = VocoderTraining(vocoder, speech)
    optimizers = [training.of_body, training.of_discriminators, training.of_pitch]
    run = TrainingRun(work / vocoder.file, seconds, training.networks, optimizers)
    step = CapturedStep(training.step, speech.device)
    for share in run:
        run.losses(**step(share > PREDICTED_PITCH_FROM, share > ADVERSARIAL_FROM))


class VocoderTraining:
    """Networks, optimizers and the training step."""

    def __init__(self, vocoder: Vocoder, speech: SpeechDataset) -> None:
        self.vocoder, self.speech = vocoder, speech
        self.hift, self.discriminators = build(vocoder).to(speech.device), Discriminators().to(speech.device)
        self.networks = nn.ModuleDict({"hift": self.hift, "discriminators": self.discriminators})
        nn.init.constant_(self.hift.f0_predictor.classifier.bias, 180.0)  # Hz, between the voices
        pitch = dict(self.hift.f0_predictor.named_parameters())
        last = [pitch.pop("classifier.weight"), pitch.pop("classifier.bias")]
        groups = [{"params": list(pitch.values())}, {"params": last, "lr": HERTZ_RATE * PITCH_RATE}]
        body = [weight for name, weight in self.hift.named_parameters() if not name.startswith("f0_predictor.")]
        self.of_body = adamw(body, PEAK_RATE, BETAS)
        self.of_discriminators = adamw(self.discriminators.parameters(), DISCRIMINATOR_RATE, BETAS)
        self.of_pitch = adamw(groups, PITCH_RATE, weight_decay=0.0)

    def step(self, predicted_pitch: bool, adversarial: bool) -> dict[str, Tensor]:
        wave, mel, f0 = random_crops(self.speech, self.vocoder.max_hz)
        predicted = self.vocoder.pitch(self.hift, mel)
        pitch_error = pitch_loss(predicted, f0)
        descend(pitch_error, self.of_pitch, clip=10.0)
        if predicted_pitch:
            chosen = torch.rand(len(f0), 1, device=f0.device) < 0.5
            f0 = torch.where(chosen, predicted.detach(), f0)
        made = self.vocoder.render(self.hift, mel, f0)
        spectral, of_mel = spectral_loss(made, wave), mel_loss(made, wave, self.vocoder.max_hz)
        loss = spectral + MEL_WEIGHT * of_mel
        found = {"spectral": spectral.detach(), "mel": of_mel.detach(), "pitch": pitch_error.detach()}
        if adversarial:
            gradient, by_discriminators = self._discriminate(wave, made)
            loss = loss + (made * gradient).sum()
            found |= by_discriminators
        descend(loss, self.of_body, clip=1.0)
        return found

    def _discriminate(self, wave: Tensor, made: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A step of the discriminators. Returns the gradient (B, N) of the generator's two losses by them, and both."""
        made = made.detach().requires_grad_(True)
        with autocast(wave.device):
            loss, fooled, matching = self.discriminators.losses(wave, made)
        of_generator = ADVERSARIAL_WEIGHT * fooled + MATCHING_WEIGHT * matching
        (gradient,) = torch.autograd.grad(of_generator, made, retain_graph=True)
        descend(loss, self.of_discriminators, clip=10.0)
        return gradient, {"adversarial": fooled.detach(), "matching": matching.detach()}


def export(vocoder: Vocoder, work: Path, path: Path) -> None:
    """The trained network as an official `hift.pt`, float16."""
    state = split_weight_norm(generator(work / vocoder.file))
    torch.save({name: tensor.half() for name, tensor in state.items()}, path)


def generator(path: Path) -> dict[str, Tensor]:
    """The trained generator's weights, without the discriminators'."""
    weights = trained(path).items()
    return {name.removeprefix("hift."): tensor for name, tensor in weights if name.startswith("hift.")}


def random_crops(speech: SpeechDataset, max_hz: float) -> tuple[Tensor, Tensor, Tensor]:
    """Random crops: waves (B, N) at 24 kHz, their mel (B, 80, T) up to `max_hz`, and f0 (B, T)."""
    length = CROP_TOKENS + 2 * MARGIN_TOKENS
    starts = speech.random_starts(BATCH, length)
    wave = speech.wave(starts, length)
    margin = MARGIN_TOKENS * TOKEN_MEL_RATIO
    inside = slice(margin, -margin)
    mel = features.mel_spectrogram(wave, features.MelConfig(max_hz=max_hz))[:, :, inside]
    f0 = fundamental(wave)[:, inside]
    return wave[:, margin * HOP_SAMPLES : -margin * HOP_SAMPLES], mel, f0


def render(hift: HiFTGenerator, mel: Tensor, f0: Tensor) -> Tensor:
    """mel (B, 80, T), f0 (B, T) in Hz -> waves (B, N).

    Not in bfloat16: quiet sounds are differences of large terms, and its rounding would be louder than they are.
    """
    B, T = f0.shape
    source, _ = hift.m_source(f0, torch.randn(B, T * HOP_SAMPLES, CONFIG.harmonics + 1, device=f0.device))
    return hift.decode(mel, source)


HIFT = Vocoder(FILE, HiFTGenerator, lambda hift, mel: hift.f0_predictor(mel), render)


def pitch_loss(predicted: Tensor, f0: Tensor) -> Tensor:
    """f0 (B, T) in Hz. Absolute errors: their optimum is the median, which is voiced or unvoiced, never in between."""
    return (predicted - f0).abs().mean() / PITCH_SCALE


def mel_loss(made: Tensor, wave: Tensor, max_hz: float) -> Tensor:
    """Mean absolute difference of log mel up to `max_hz`; waves (B, N)."""
    config = features.MelConfig(max_hz=max_hz)
    found, wanted = (features.mel_spectrogram(x, config).clamp(min=QUIETEST_MEL) for x in (made, wave))
    return (found - wanted).abs().mean()


def spectral_loss(made: Tensor, wave: Tensor) -> Tensor:
    """Multi-resolution STFT loss: log distance and spectral convergence of magnitudes; waves (B, N)."""
    total = made.new_zeros(())
    for n_fft, hop in RESOLUTIONS:
        window = torch.hann_window(n_fft, device=wave.device)
        found, wanted = (torch.stft(x, n_fft, hop, window=window, return_complex=True).abs() for x in (made, wave))
        quietest = QUIETEST * n_fft
        total = total + (found.clamp(min=quietest).log() - wanted.clamp(min=quietest).log()).abs().mean()
        total = total + (found - wanted).norm() / wanted.norm().clamp(min=1e-2)
    return total
