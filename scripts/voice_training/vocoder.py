"""Stage `vocoder`: HiFT, one network for both stacks.

The generator learns from the pitch that autocorrelation finds, the pitch predictor by its own loss; towards the end,
half of the rows hear the predicted pitch, as they do when served. The judges come in the second part: before, they
would only see that everything is wrong.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from common import audio
from common.constants import HOP_SAMPLES, TOKEN_MEL_RATIO
from common.hift import HiFTConfig, HiFTGenerator, split_weight_norm
from common.hift.generator import Snake
from scripts.voice_training.dataset import Speech
from scripts.voice_training.discriminators import Discriminators
from scripts.voice_training.pitch import fundamental
from scripts.voice_training.resampling import upsampled
from scripts.voice_training.training import Run, adamw, autocast, descend, prepare, trained

CONFIG = HiFTConfig(channels=128, f0_channels=64, resblock_kernels=(3, 5, 7), source_resblock_kernels=(3, 3, 5))
FILE = "hift.pt"
CROP_TOKENS, MARGIN_TOKENS, BATCH = 20, 2, 64  # a margin on both sides, so that mel and pitch have their context
PEAK_RATE, JUDGES_RATE, PITCH_RATE = 8e-4, 4e-4, 1e-3
BETAS = (0.8, 0.99)
HERTZ_RATE = 100  # the pitch predictor's last layer gives Hz, so its weights are that much larger than others
JUDGED_FROM = 0.45  # share of the time
OWN_PITCH_FROM = 0.3
RESOLUTIONS = ((128, 32), (512, 128), (1024, 256), (2048, 512))  # windows and hops
MEL_WEIGHT, JUDGED_WEIGHT, ALIKE_WEIGHT = 3.0, 0.5, 0.25
PITCH_SCALE = 50.0  # Hz that count as an error of one


class TrainedSnake(Snake):
    """The same in operations that have gradients, which the GPU's kernel has not."""

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        alpha = self.alpha[:, None]
        return x + torch.sin(alpha * x).square() / (alpha + 1e-9)


def build() -> HiFTGenerator:
    """The network as it is trained: of the same weights as the served one."""
    hift = HiFTGenerator(CONFIG)
    for module in list(hift.modules()):
        for name, child in module.named_children():
            if isinstance(child, Snake):
                module.register_module(name, TrainedSnake(len(child.alpha)))
    return hift


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    speech = Speech.load(work, prepare(device, seed=3))
    hift, judges = build().to(speech.device), Discriminators().to(speech.device)
    nn.init.constant_(hift.f0_predictor.classifier.bias, 120.0)  # Hz, between the voices
    pitch = dict(hift.f0_predictor.named_parameters())
    last = [pitch.pop("classifier.weight"), pitch.pop("classifier.bias")]
    groups = [{"params": list(pitch.values())}, {"params": last, "lr": HERTZ_RATE * PITCH_RATE}]
    body = [weight for name, weight in hift.named_parameters() if not name.startswith("f0_predictor.")]
    of_body, of_judges = adamw(body, PEAK_RATE, BETAS), adamw(judges.parameters(), JUDGES_RATE, BETAS)
    of_pitch = adamw(groups, PITCH_RATE, weight_decay=0.0)
    run = Run(work / FILE, seconds, {"network": hift, "judges": judges}, [of_body, of_judges, of_pitch])
    for share in run:
        wave, mel, f0 = draw(speech)
        predicted = hift.f0(mel)
        pitch_error = pitch_loss(predicted, f0)
        descend(pitch_error, of_pitch, clip=10.0)
        if share > OWN_PITCH_FROM:
            own = torch.rand(len(f0), 1, device=f0.device) < 0.5
            f0 = torch.where(own, predicted.detach(), f0)
        made = render(hift, mel, f0)
        spectral, of_mel = (
            spectral_loss(made, wave),
            (audio.mel_spectrogram(made) - audio.mel_spectrogram(wave)).abs().mean(),
        )
        loss = spectral + MEL_WEIGHT * of_mel
        taken = made.new_zeros(())
        if share > JUDGED_FROM:
            with autocast(speech.device):
                judged = judges.loss(wave, made.detach())
            descend(judged, of_judges, clip=10.0)
            judges.requires_grad_(False)  # half the work: only the waves' gradients are wanted
            with autocast(speech.device):
                taken, alike = judges.generator_loss(wave, made)
            judges.requires_grad_(True)
            loss = loss + JUDGED_WEIGHT * taken + ALIKE_WEIGHT * alike
        descend(loss, of_body, clip=10.0)
        run.losses(spectral=spectral.detach(), mel=of_mel.detach(), pitch=pitch_error.detach(), taken=taken.detach())


def export(work: Path, path: Path) -> None:
    """The trained network as an official `hift.pt`, float16."""
    state = split_weight_norm(trained(work / FILE))
    torch.save({name: tensor.half() for name, tensor in state.items()}, path)


def draw(speech: Speech) -> tuple[Tensor, Tensor, Tensor]:
    """Random crops: waves (B, N) at 24 kHz, their mel (B, 80, T) and f0 (B, T)."""
    length = CROP_TOKENS + 2 * MARGIN_TOKENS
    starts = speech.random_starts(BATCH, length)
    wave = upsampled(speech.wave(starts, length))
    margin = MARGIN_TOKENS * TOKEN_MEL_RATIO
    inside = slice(margin, -margin)
    mel, f0 = audio.mel_spectrogram(wave)[:, :, inside], fundamental(wave)[:, inside]
    return wave[:, margin * HOP_SAMPLES : -margin * HOP_SAMPLES], mel, f0


def render(hift: HiFTGenerator, mel: Tensor, f0: Tensor) -> Tensor:
    """mel (B, 80, T), f0 (B, T) -> waves (B, N); the source in full precision, as it is served."""
    B, T = f0.shape
    source = hift.source(f0, torch.randn(B, T * HOP_SAMPLES, CONFIG.harmonics + 1, device=f0.device))
    with autocast(f0.device):
        return hift.decode(mel, source)


def pitch_loss(predicted: Tensor, f0: Tensor) -> Tensor:
    """(B, T) in Hz. Absolute errors, whose optimum is the median: voiced or not, but never in between."""
    return (predicted - f0).abs().mean() / PITCH_SCALE


def spectral_loss(made: Tensor, wave: Tensor) -> Tensor:
    """Of magnitudes at several resolutions: log distance, and distance relative to the whole."""
    total = made.new_zeros(())
    for n_fft, hop in RESOLUTIONS:
        window = torch.hann_window(n_fft, device=wave.device)
        found, wanted = (
            torch.stft(x, n_fft, hop, window=window, return_complex=True).abs().clamp(min=1e-4) for x in (made, wave)
        )
        total = total + (found.log() - wanted.log()).abs().mean()
        total = total + (found - wanted).norm() / wanted.norm().clamp(min=1e-2)
    return total
