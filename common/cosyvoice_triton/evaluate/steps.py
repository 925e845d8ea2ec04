"""What fewer Euler steps change: the error of the mel, and the fewest steps whose speech is as good."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.config import Token2WavConfig
from cosyvoice_triton.evaluate.report import Row
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.voice.audio import load_recording
from cosyvoice_triton.voice.encoders import ReferenceEncoder

REFERENCE_STEPS = 100  # of the demo's DiT, 400 change their mel by 0.003; 10 are 0.036 off
MAX_VOICES, MAX_SECONDS = 4, 5.0  # rendered for the error
# Rows that differ by less are as good: half a word in a hundred, 0.05 of DNSMOS.
TOLERATED = {"error_rate": 0.005, "dnsmos": -0.05}


def mel_errors(options: StackOptions, steps: Sequence[int]) -> list[float]:
    """Return for each number of steps the root mean square error of the mel against REFERENCE_STEPS, in standard
    deviations of the mel: the registered recordings, or the package's sample, are rendered again from their tokens, on
    the CPU in float32. ValueError if the checkpoint has a time grid of its own."""
    stack, folder = stacks.named(options.stack), options.checkpoint_dir
    paths = sorted(options.voices_dir.glob("*.wav"))[:MAX_VOICES] or [samples.FOLDER / "reference_en.wav"]
    encoder = ReferenceEncoder(stack, folder)
    voices = [load_recording(path) for path in paths]
    prompts = [encoder(replace(voice, wav=voice.wav[: round(MAX_SECONDS * voice.rate)])) for voice in voices]
    mels = []
    for count in (REFERENCE_STEPS, *steps):
        config = Token2WavConfig(
            model_dir=str(folder),
            device="cpu",
            flow_runtime="torch",
            flow_precision="float32",
            vocoder_precision="float32",
            n_timesteps=count,
            max_streams=1,
        )
        engine = Token2Wav.from_config(stack, config)
        mels.append(torch.cat(engine.whole_mels([(prompt, prompt.tokens) for prompt in prompts]), dim=1))
    exact = mels[0]
    return [((mel - exact).square().mean().sqrt() / exact.std()).item() for mel in mels[1:]]


def recommended(rows: Sequence[Row], steps: Sequence[int]) -> int | None:
    """Return the fewest steps whose row is no worse than that of the most by more than TOLERATED; None without words
    and DNSMOS, by which speech is judged."""
    of = dict(zip(steps, rows, strict=True))
    most = of[max(steps)]
    judged = [name for name in TOLERATED if most[name] is not None]
    if not judged:
        return None

    def as_good(row: Row) -> bool:
        return all((row[name] - most[name]) / TOLERATED[name] <= 1 for name in judged)

    return min(count for count, row in of.items() if as_good(row))
