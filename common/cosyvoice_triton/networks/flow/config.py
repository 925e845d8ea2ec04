"""Sizes of the flow networks. Defaults are the official sizes; `from_shapes` reads them from a checkpoint's tensors."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from cosyvoice_triton import constants
from cosyvoice_triton.checkpoint import Shapes, size_of

FlowConfigT = TypeVar("FlowConfigT", bound="FlowConfig")
PARTS = ("encoder", "estimator")  # of a flow, each with sizes of its own
UNET_HEAD_DIM = 64  # cannot be read from a checkpoint: to_q is (heads * head_dim, channels)


def _count(shapes: Shapes, prefix: str) -> int:
    """Count the modules `prefix.0`, `prefix.1`, ... in the checkpoint."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    return len({match[1] for key in shapes if (match := pattern.match(key))})


@dataclass(frozen=True)
class EncoderConfig:
    """Upsampling conformer encoder: `blocks` layers at token rate, `up_blocks` layers at mel rate.

    chunk_tokens: attention chunk of the training masks (upstream's `static_chunk_size`); no tensor shows it.
    """

    width: int = 512
    heads: int = 8
    feed_forward: int = 2048
    blocks: int = 6
    up_blocks: int = 4
    lookahead: int = constants.LOOKAHEAD_TOKENS
    ratio: int = constants.TOKEN_MEL_RATIO
    chunk_tokens: int = constants.FLOW_CHUNK_TOKENS

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "EncoderConfig":
        prefix = "encoder."
        return cls(
            width=size_of(shapes, f"{prefix}embed.out.0.weight"),
            heads=size_of(shapes, f"{prefix}encoders.0.self_attn.pos_bias_u"),
            feed_forward=size_of(shapes, f"{prefix}encoders.0.feed_forward.w_1.weight"),
            blocks=_count(shapes, f"{prefix}encoders"),
            up_blocks=_count(shapes, f"{prefix}up_encoders"),
            lookahead=size_of(shapes, f"{prefix}pre_lookahead_layer.conv1.weight", 2) - 1,
            ratio=(size_of(shapes, f"{prefix}up_layer.conv.weight", 2) - 1) // 2,
        )


@dataclass(frozen=True)
class UNetConfig:
    """Causal UNet estimator with one level: CosyVoice2's never changes the frame rate.

    head_dim, chunk_frames (upstream's `static_chunk_size`): no tensor shows them.
    """

    in_channels: int = 4 * constants.MEL_BINS  # noisy mel, encoder output, speaker, prompt mel
    out_channels: int = constants.MEL_BINS
    channels: int = 256
    heads: int = 8
    head_dim: int = UNET_HEAD_DIM
    blocks: int = 4  # transformer blocks per stage
    mid_stages: int = 12
    chunk_frames: int = constants.FLOW_CHUNK_TOKENS * constants.TOKEN_MEL_RATIO

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "UNetConfig":
        prefix = "decoder.estimator."
        return cls(
            in_channels=size_of(shapes, f"{prefix}down_blocks.0.0.block1.block.0.weight", 1),
            out_channels=size_of(shapes, f"{prefix}final_proj.weight"),
            channels=size_of(shapes, f"{prefix}down_blocks.0.0.block1.block.0.weight"),
            heads=size_of(shapes, f"{prefix}down_blocks.0.1.0.attn1.to_q.weight") // UNET_HEAD_DIM,
            blocks=_count(shapes, f"{prefix}down_blocks.0.1"),
            mid_stages=_count(shapes, f"{prefix}mid_blocks"),
        )


@dataclass(frozen=True)
class DiTConfig:
    """Causal diffusion transformer estimator of Step-Audio2."""

    in_channels: int = 4 * constants.MEL_BINS  # noisy mel, encoder output, speaker, prompt mel
    out_channels: int = constants.MEL_BINS
    width: int = 512
    depth: int = 16
    heads: int = 8
    head_dim: int = 64
    feed_forward: int = 2048
    time_frequencies: int = 256
    conv_kernel: ClassVar[int] = 3
    chunk_frames: ClassVar[int] = 0

    @property
    def conv_pairs(self) -> int:
        """Count the pairs of causal convolutions: one in each block."""
        return self.depth

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "DiTConfig":
        prefix = "decoder.estimator."
        head_dim = size_of(shapes, f"{prefix}blocks.0.attn.q_norm.weight")
        return cls(
            in_channels=size_of(shapes, f"{prefix}in_proj.weight", 1),
            out_channels=size_of(shapes, f"{prefix}final_layer.linear.weight"),
            width=size_of(shapes, f"{prefix}in_proj.weight"),
            depth=_count(shapes, f"{prefix}blocks"),
            heads=size_of(shapes, f"{prefix}blocks.0.attn.to_q.weight") // head_dim,
            head_dim=head_dim,
            feed_forward=size_of(shapes, f"{prefix}blocks.0.mlp.fc1.weight"),
            time_frequencies=size_of(shapes, f"{prefix}t_embedder.mlp.0.weight", 1),
        )


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """What all flows share: token embedding, speaker projection, and how the mel is solved, which no tensor shows.

    steps: of the Euler solve. time_grid: where they begin, and the end of the last one; empty: upstream's cosine.
    guidance: weight of classifier-free guidance (upstream's `inference_cfg_rate`); 0: the network was trained to need
    none, so that a stream has no unconditional row. ValueError if they do not fit together.
    """

    vocab: int = constants.SPEECH_VOCAB
    speaker_dim: int = constants.SPEAKER_DIM
    mel_bins: int = constants.MEL_BINS
    steps: int = constants.EULER_STEPS
    time_grid: tuple[float, ...] = ()
    guidance: float = constants.GUIDANCE

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1 or not 0 <= self.guidance < math.inf:
            raise ValueError(f"a flow of {self.steps} steps and guidance {self.guidance:g}: use 1 or more, 0 or more")
        check_time_grid(self.time_grid, self.steps)

    @property
    def rows(self) -> int:
        """Return the rows of a batch for each stream: a conditional one, and an unconditional one if there is
        guidance."""
        return 2 if self.guidance else 1

    @classmethod
    def from_shapes(cls: type[FlowConfigT], shapes: Shapes, **solve: Any) -> FlowConfigT:
        """Read the sizes of tensors; `solve`: what the checkpoint states in addition, see `stated_solve`."""
        parts: dict[str, Any] = {part.name: part.default_factory for part in fields(cls) if part.name in PARTS}
        return cls(
            vocab=size_of(shapes, "input_embedding.weight"),
            speaker_dim=size_of(shapes, "spk_embed_affine_layer.weight", 1),
            mel_bins=size_of(shapes, "spk_embed_affine_layer.weight"),
            **{name: part.from_shapes(shapes) for name, part in parts.items()},
            **solve,
        )


def check_time_grid(time_grid: Sequence[float], steps: int) -> None:
    """Raise ValueError unless the times are empty or those of so many steps."""
    rises = all(before < after for before, after in zip(time_grid, time_grid[1:], strict=False))
    if time_grid and not (len(time_grid) == steps + 1 and time_grid[0] == 0 and time_grid[-1] == 1 and rises):
        raise ValueError(f"time_grid {list(time_grid)} is not {steps + 1} rising times from 0 to 1, for {steps} steps")


def stated_solve(flow: Path) -> dict[str, Any]:
    """Return what a checkpoint states of its solve, in a JSON next to its `flow.pt`: `steps`, `time_grid`, `guidance`.

    Nothing without the file: the solve is upstream's. ValueError naming what is unknown or unreadable.
    """
    path = flow.with_suffix(".json")
    if not path.exists():
        return {}
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        if unknown := stated.keys() - {"steps", "time_grid", "guidance"}:
            raise ValueError(f"it has {sorted(unknown)}; use steps, time_grid and guidance")
        FlowConfig(**(stated := stated | {"time_grid": tuple(stated.get("time_grid", ()))}))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return stated


def euler_steps(flow: Path, asked: int | None = None) -> int:
    """Return the Euler steps of a checkpoint, or those that are asked for. ValueError if it has a grid of others."""
    config = FlowConfig(**stated_solve(flow))
    if asked and asked != config.steps and config.time_grid:
        raise ValueError(
            f"n_timesteps {asked}: {flow} has a time_grid of {config.steps} steps: leave n_timesteps empty"
        )
    return asked or config.steps


@dataclass(frozen=True, kw_only=True)
class ConformerFlowConfig(FlowConfig):
    """A flow with the conformer encoder."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)


@dataclass(frozen=True, kw_only=True)
class UNetFlowConfig(ConformerFlowConfig):
    """The flow of CosyVoice2's `flow.pt`."""

    estimator: UNetConfig = field(default_factory=UNetConfig)


@dataclass(frozen=True, kw_only=True)
class DiTFlowConfig(ConformerFlowConfig):
    """The flow of Step-Audio2's `token2wav/flow.pt`."""

    estimator: DiTConfig = field(default_factory=DiTConfig)


@dataclass(frozen=True)
class LookaheadConfig:
    """CosyVoice3's encoder: the look-ahead layer alone, then each token `ratio` times.

    ratio, chunk_tokens: as in `EncoderConfig`; no tensor shows them.
    """

    width: int = constants.MEL_BINS
    hidden: int = 1024
    lookahead: int = constants.LOOKAHEAD_TOKENS
    ratio: int = constants.TOKEN_MEL_RATIO
    chunk_tokens: int = constants.FLOW_CHUNK_TOKENS

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "LookaheadConfig":
        conv = "pre_lookahead_layer.conv1.weight"
        return cls(width=size_of(shapes, conv, 1), hidden=size_of(shapes, conv), lookahead=size_of(shapes, conv, 2) - 1)


@dataclass(frozen=True)
class RotaryDiTConfig:
    """Diffusion transformer estimator of CosyVoice3.

    conv_groups, chunk_frames (upstream's `static_chunk_size`): no tensor shows them. conv_pairs: of causal
    convolutions, before the first block.
    """

    in_channels: int = 4 * constants.MEL_BINS  # noisy mel, prompt mel, encoder output, speaker
    out_channels: int = constants.MEL_BINS
    width: int = 1024
    depth: int = 22
    heads: int = 16
    head_dim: int = 64
    feed_forward: int = 2048
    time_frequencies: int = 256
    conv_kernel: int = 31
    conv_groups: int = 16
    chunk_frames: int = constants.FLOW_CHUNK_TOKENS * constants.TOKEN_MEL_RATIO
    conv_pairs: ClassVar[int] = 1

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "RotaryDiTConfig":
        prefix = "decoder.estimator."
        head_dim = 2 * size_of(shapes, f"{prefix}rotary_embed.inv_freq")
        return cls(
            in_channels=size_of(shapes, f"{prefix}input_embed.proj.weight", 1),
            out_channels=size_of(shapes, f"{prefix}proj_out.weight"),
            width=size_of(shapes, f"{prefix}input_embed.proj.weight"),
            depth=_count(shapes, f"{prefix}transformer_blocks"),
            heads=size_of(shapes, f"{prefix}transformer_blocks.0.attn.to_q.weight") // head_dim,
            head_dim=head_dim,
            feed_forward=size_of(shapes, f"{prefix}transformer_blocks.0.ff.ff.0.0.weight"),
            time_frequencies=size_of(shapes, f"{prefix}time_embed.time_mlp.0.weight", 1),
            conv_kernel=size_of(shapes, f"{prefix}input_embed.conv_pos_embed.conv1.0.weight", 2),
        )


@dataclass(frozen=True, kw_only=True)
class CosyVoice3FlowConfig(FlowConfig):
    """The flow of CosyVoice3's `flow.pt`."""

    encoder: LookaheadConfig = field(default_factory=LookaheadConfig)
    estimator: RotaryDiTConfig = field(default_factory=RotaryDiTConfig)
