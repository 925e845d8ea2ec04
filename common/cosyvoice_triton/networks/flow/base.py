"""Speech tokens to mel by conditional flow matching: the time schedule, classifier-free guidance, the Euler solve."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.flow.config import ConformerFlowConfig, FlowConfig, check_time_grid
from cosyvoice_triton.networks.flow.encoder import UpsampleConformerEncoder

# (Euler step, x (R, C, T), time (R,), encoder output (R, C, T), speaker (R, C), condition (R, C, T)) -> (R, C, T)
Velocity = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

Estimator = TypeVar("Estimator", bound=nn.Module)


def time_schedule(steps: int, time_grid: Sequence[float] = ()) -> tuple[list[float], list[float]]:
    """Return times and step widths of a grid; without one, of the cosine t = 1 - cos(pi / 2 * i / steps), dense near
    the noise (t = 0). ValueError if a grid is of other steps.

    Time is accumulated in float32 and widths are differences to the accumulated time, as in upstream's solver.
    """
    check_time_grid(time_grid, steps)
    cosine = 1 - torch.cos(torch.linspace(0, 1, steps + 1, dtype=torch.float32) * 0.5 * torch.pi)
    span = torch.tensor(time_grid, dtype=torch.float32) if time_grid else cosine
    time, times, widths = span[0], [], []
    for following in span[1:]:
        width = following - time
        times.append(time.item())
        widths.append(width.item())
        time = time + width
    return times, widths


class FlowMatching(nn.Module, Generic[Estimator]):
    """Euler solve from noise to mel. Holds the estimator under the checkpoint's key `decoder.estimator`.

    guidance, time_grid: see `FlowConfig`. A batch has `rows` rows for each stream, the conditional ones first.
    """

    def __init__(self, estimator: Estimator, guidance: float, time_grid: Sequence[float] = ()) -> None:
        super().__init__()
        self.estimator = estimator
        self.guidance = guidance
        self.rows = 2 if guidance else 1
        self._time_grid = time_grid

    def schedule(self, steps: int) -> tuple[list[float], list[float]]:
        """Return times and step widths, see `time_schedule`."""
        return time_schedule(steps, self._time_grid)

    def guided(self, velocity: Tensor) -> Tensor:
        """Return the velocity of streams, given that of their rows: (1 + w) * conditional - w * unconditional."""
        if self.rows == 1:
            return velocity
        conditional, unconditional = velocity.chunk(2)
        return (1 + self.guidance) * conditional - self.guidance * unconditional

    def solve(
        self,
        velocity: Velocity,
        noise: Tensor,
        mu: Tensor,
        speaker: Tensor,
        condition: Tensor,
        steps: int,
        before_step: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Solve: noise (1 or B, C, T), mu and condition (B, C, T), speaker (B, C) -> mel (B, C, T).

        Conditional and unconditional rows are one batch. The state keeps the dtype of the noise (float32), whatever the
        estimator computes in. An exception of `before_step` ends the solve.
        """
        B = mu.shape[0]
        times, widths = self.schedule(steps)
        # One time value per row: exported estimators take it as (rows,).
        time_rows = torch.tensor(times, device=mu.device)[:, None].repeat(1, self.rows * B)
        if self.rows > 1:
            mu, speaker, condition = (torch.cat([part, torch.zeros_like(part)]) for part in (mu, speaker, condition))
        x = noise.expand(B, -1, -1)
        for step, width in enumerate(widths):
            before_step()
            rows = x.repeat(self.rows, 1, 1).to(mu.dtype)
            x = x + width * self.guided(velocity(step, rows, time_rows[step], mu, speaker, condition))
        return x


class MelFlow(nn.Module, Generic[Estimator]):
    """Speech tokens to log mel by conditional flow matching. Attribute names are the checkpoint's keys."""

    decoder: FlowMatching[Estimator]

    def __init__(self, config: FlowConfig, token_width: int) -> None:
        super().__init__()
        # Initialised here: nn.Embedding's own initialisation imports torch's compiler on the meta device (seconds).
        self.input_embedding = nn.Embedding.from_pretrained(torch.randn(config.vocab, token_width))
        self.spk_embed_affine_layer = nn.Linear(config.speaker_dim, config.mel_bins)

    @abstractmethod
    def encode_window(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Encode windows: tokens (B, T, 1 + lookahead), visible (B, T) -> encoder output mu (B, 2T, mel).

        `tokens` holds each speech token followed by the tokens ahead of it, -1 where there is none; `visible` is the
        number of tokens, counted from the first, that each token attends to, if the encoder has attention.
        """

    def solve(
        self,
        mu: Tensor,
        valid: Tensor,
        prompt_feat: Tensor,
        embedding: Tensor,
        *,
        noise: Tensor,
        steps: int,
        before_step: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Return the mel (B, mel, T) of whole utterances, prompt included; rows do not affect each other.

        mu (B, mel, T): encoder output; valid (B, 1, T) bool: frames that are not padding; prompt_feat (B, P, mel): the
        prompt's mel, zero-padded; embedding (B, speaker_dim): x-vector; noise (1 or B, mel, T).
        """
        valid = valid.repeat(self.decoder.rows, 1, 1)
        estimator = self.decoder.estimator
        return self.decoder.solve(
            lambda _, *rows: estimator(*rows, valid=valid),
            noise,
            mu,
            self.project_speaker(embedding),
            self.prompt_condition(prompt_feat, mu.shape[2]),
            steps,
            before_step,
        )

    def project_speaker(self, embedding: Tensor) -> Tensor:
        """Project an x-vector (B, speaker_dim), which is normalised here -> (B, mel)."""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=1).to(self.spk_embed_affine_layer.weight.dtype))

    def prompt_condition(self, prompt_feat: Tensor, frames: int) -> Tensor:
        """Extend the prompt's mel (B, P, mel) -> (B, mel, frames): the prompt's frames, then zeros."""
        condition = prompt_feat.transpose(1, 2).to(
            self.spk_embed_affine_layer.weight.dtype
        )  # (B, P, mel) -> (B, mel, P)
        return F.pad(condition, (0, frames - condition.shape[2]))


class ConformerFlow(MelFlow[Estimator]):
    """A flow with the upsampling conformer encoder, which CosyVoice2's and Step-Audio2's have."""

    def __init__(self, config: ConformerFlowConfig, estimator: Estimator) -> None:
        super().__init__(config, config.encoder.width)
        self.encoder = UpsampleConformerEncoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.width, config.mel_bins)
        self.decoder = FlowMatching(estimator, config.guidance, config.time_grid)

    def encode_window(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """See `MelFlow.encode_window` and the encoder's `forward`."""
        h = self.encoder(self.input_embedding(tokens.clamp(min=0)), tokens >= 0, visible)
        return self.encoder_proj(h)
