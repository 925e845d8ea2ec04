"""The teacher: Kokoro-82M (Apache-2.0) in torch, for many utterances at once, with the time of every phoneme.

The stage `teacher` writes its folder (kokoro_weights.py); the networks are classes of the package `kokoro`.
Batches hold utterances of equal length, because the networks normalise over time and would hear padding: the silence
at the end is extended by up to FRAME_STEP - 1 frames so that many lengths are equal.
"""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AlbertConfig

from demo_voice.training import kokoro_weights

logger = logging.getLogger(__name__)

# The demo's voices first: named after those of the package, a woman's, a man's and two women's. A fifth and mixtures
# of all add variety to the training data.
DEMO_VOICES = ("nezumi", "kumo", "gongitsune", "alpha")
_SOURCES = ("jf_nezumi", "jm_kumo", "jf_gongitsune", "jf_alpha", "jf_tebukuro")
_MALE = 1  # index in _SOURCES
MIXTURES = 16
VOICES = (*DEMO_VOICES, "tebukuro", *(f"mixture{index}" for index in range(MIXTURES)))

SAMPLE_RATE = 24000
FRAME_SAMPLES = 600  # 40 frames a second
FRAME_STEP = 4
MOST_PHONEMES = 400
TEXTS_AT_ONCE = 128
FRAMES_AT_ONCE = 6400  # 160 s
STYLE = 128  # the first half of a style vector is for the decoder, the second for the prosody

_CONFIG: dict[str, dict[str, Any]] = {
    "bert": {
        "vocab_size": 178, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048,
        "max_position_embeddings": 512, "num_hidden_layers": 12,
    },
    "predictor": {"style_dim": STYLE, "d_hid": 512, "nlayers": 3, "max_dur": 50, "dropout": 0.2},
    "text_encoder": {"channels": 512, "kernel_size": 5, "depth": 3, "n_symbols": 178},
    "decoder": {
        "dim_in": 512, "style_dim": STYLE, "dim_out": 80, "resblock_kernel_sizes": [3, 7, 11],
        "upsample_rates": [10, 6], "upsample_initial_channel": 512, "resblock_dilation_sizes": [[1, 3, 5]] * 3,
        "upsample_kernel_sizes": [20, 12], "gen_istft_n_fft": 20, "gen_istft_hop_size": 5,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Utterance:
    """What is to be said: phonemes as ids between two zeros, a voice (index of VOICES), and a speed around 1."""

    ids: list[int]
    voice: int
    speed: float


@dataclass(frozen=True)
class Spoken:
    """The utterance `index`: its wave (N,) float32 at 24 kHz, and the frames of 600 samples of each of its ids."""

    index: int
    wave: np.ndarray
    frames: np.ndarray


class Teacher:
    """Kokoro on a device: float32, and the decoder in half precision on a GPU. OSError without its files."""

    def __init__(self, folder: Path, device: str | torch.device) -> None:
        self.device = torch.device(device)
        # Durations are rounded: with TF32 too many would differ.
        torch.backends.cudnn.allow_tf32 = False
        half = self.device.type == "cuda"
        self._dtype = torch.float16 if half else torch.float32
        self._vocab: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        self._letters = {known: letter for letter, known in self._vocab.items()}
        with np.load(folder / "voices.npz") as tables:
            self._styles = torch.from_numpy(mixed([tables[name][:, 0] for name in _SOURCES])).to(self.device)
        self.networks = _networks(folder).to(self.device)
        if half:
            _halve(self.networks["decoder"])

    def ids(self, phonemes: str) -> list[int]:
        """Ids of phonemes, without those that the teacher does not know."""
        known = [self._vocab[phoneme] for phoneme in phonemes if phoneme in self._vocab]
        return [0, *known[:MOST_PHONEMES], 0]

    def letters(self, ids: Sequence[int]) -> str:
        """The phoneme of each id, for zeros a full stop."""
        return "".join(self._letters.get(known, ".") for known in ids)

    @torch.inference_mode()
    def speak(self, utterances: Sequence[Utterance], seed: int = 0) -> Iterator[Spoken]:
        """All utterances in a random order, so that the caller may stop at any time. A failing batch is logged and
        left out."""
        features, styles, frames = self._durations(utterances)
        lengths = np.array([row.sum() for row in frames])
        starts = np.cumsum([0, *(len(utterance.ids) for utterance in utterances)])
        batches = [
            members[begin : begin + max(1, FRAMES_AT_ONCE // int(length))]
            for length in np.unique(lengths)
            for members in [np.flatnonzero(lengths == length)]
            for begin in range(0, len(members), max(1, FRAMES_AT_ONCE // int(length)))
        ]
        np.random.default_rng(seed).shuffle(batches)
        for members in batches:
            index = np.stack([np.repeat(np.arange(starts[u], starts[u + 1]), frames[u]) for u in members])
            try:
                waves = self._waves(features[torch.from_numpy(index).to(self.device)], styles[members.tolist()])
            except RuntimeError:
                logger.exception("teacher: %d utterances of %d frames are left out", len(members), index.shape[1])
                continue
            for u, wave in zip(members.tolist(), waves.cpu().numpy(), strict=True):
                yield Spoken(u, wave, frames[u])

    def _durations(self, utterances: Sequence[Utterance]) -> tuple[Tensor, Tensor, list[np.ndarray]]:
        """Features (all ids, 640 + 512) of the utterances one after another, styles (U, 256), and frames per id."""
        networks = self.networks
        lengths = np.array([len(utterance.ids) for utterance in utterances])
        styles = torch.stack([
            self._styles[utterance.voice, min(len(utterance.ids) - 2, self._styles.shape[1]) - 1]
            for utterance in utterances
        ])  # fmt: skip
        features: list[Tensor] = [torch.empty(0)] * len(utterances)
        frames: list[np.ndarray] = [np.zeros(0, np.int64)] * len(utterances)
        for members in np.split(np.argsort(lengths), range(TEXTS_AT_ONCE, len(lengths), TEXTS_AT_ONCE)):
            longest = int(lengths[members].max())
            ids = torch.zeros(len(members), longest, dtype=torch.int64)
            for row, u in enumerate(members):
                ids[row, : lengths[u]] = torch.tensor(utterances[u].ids)
            counts = torch.from_numpy(lengths[members])
            padding = (torch.arange(longest) >= counts[:, None]).to(self.device)
            ids, style = ids.to(self.device), styles[members.tolist()][:, STYLE:]
            speed = torch.tensor([utterances[u].speed for u in members], device=self.device)
            context = networks["bert"](ids, attention_mask=(~padding).int()).last_hidden_state
            context = networks["bert_encoder"](context).transpose(1, 2)
            everything = torch.eye(longest, device=self.device)
            logits, prosody = networks["predictor"](context, style, counts, everything, padding)
            sounds = networks["text_encoder"](ids, counts, padding)
            both = torch.cat([prosody, sounds], dim=1).transpose(1, 2)
            durations = (logits.sigmoid().sum(-1) / speed[:, None]).round().clamp(min=1).long().cpu().numpy()
            for row, u in enumerate(members):
                features[u] = both[row, : lengths[u]]
                frames[u] = durations[row, : lengths[u]]
                frames[u][-1] += -frames[u].sum() % FRAME_STEP
        return torch.cat(features), styles, frames

    def _waves(self, features: Tensor, styles: Tensor) -> Tensor:
        """Features (B, F, 640 + 512) by frame, styles (B, 256) -> waves (B, F * 600) float32"""
        prosody, sounds = features.transpose(1, 2).split([features.shape[2] - 512, 512], dim=1)
        predictor: Any = self.networks["predictor"]
        f0, energy = predictor.F0Ntrain(prosody, styles[:, STYLE:])
        wave = self.networks["decoder"](sounds.to(self._dtype), f0, energy, styles[:, :STYLE].to(self._dtype))
        return wave.float().flatten(1)


def mixed(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Styles (VOICES, 510, 256) from those (510, 256) of _SOURCES: the same, and mixtures.

    Weights are drawn for sound and prosody alike, then a little apart; half of the mixtures have a man's voice. Some
    weights are slightly negative, which leads away from the voice.
    """
    rng = np.random.default_rng(70)
    styles = [*tables]
    for index in range(MIXTURES):
        halves = []
        common = rng.dirichlet(np.full(len(tables), 0.7))
        for _ in range(2):
            weights = 0.7 * common + 0.3 * rng.dirichlet(np.full(len(tables), 0.7))
            if index % 2:
                weights = 0.35 * weights + 0.65 * np.eye(len(tables))[_MALE]
            weights = 1.2 * weights - 0.2 / len(tables)
            halves.append(sum(weight * table for weight, table in zip(weights, tables, strict=True)))
        styles.append(np.concatenate([halves[0][:, :STYLE], halves[1][:, STYLE:]], axis=1))
    return np.stack(styles).astype(np.float32)


def _networks(folder: Path) -> nn.ModuleDict:
    """The networks of the package with their weights, which include weight norm."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    modules, istftnet = (import_module(f"kokoro.{name}") for name in ("modules", "istftnet"))
    for module in (modules, istftnet):
        module.weight_norm = lambda network: network  # type: ignore[attr-defined]  # theirs is in the weights
    make: dict[str, Any] = {
        "bert": lambda: modules.AlbertModel(AlbertConfig(**_CONFIG["bert"])),
        "bert_encoder": lambda: nn.Linear(768, 512),
        "predictor": lambda: modules.ProsodyPredictor(**_CONFIG["predictor"]),
        "text_encoder": lambda: modules.TextEncoder(**_CONFIG["text_encoder"]),
        "decoder": lambda: istftnet.Decoder(**_CONFIG["decoder"]),
    }
    networks = nn.ModuleDict({name: build() for name, build in make.items()})
    weights = {name: torch.from_numpy(np.array(array)) for name, array in kokoro_weights.load(folder).items()}
    missing, unexpected = networks.load_state_dict(weights, strict=False)
    # Instance norms have no weights of their own, and nothing uses BERT's pooler.
    missing = [name for name in missing if ".norm." not in name and "pooler" not in name]
    if missing or unexpected:
        raise ValueError(f"the teacher's weights do not fit: {missing} missing, {unexpected} unexpected")
    return networks.eval()


def _halve(decoder: nn.Module) -> None:
    """Half precision for the decoder, except for the source signal and the waves, whose phases need more."""
    decoder.half()
    generator: Any = decoder.generator
    generator.m_source.float()
    for convolution in (decoder.F0_conv, decoder.N_conv, *generator.noise_convs):
        convolution.register_forward_pre_hook(lambda _, inputs: (inputs[0].half(),))
    generator.conv_post.register_forward_hook(lambda _, inputs, output: output.float())
