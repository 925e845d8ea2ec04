"""The smallest vocoder, which CONTRIBUTING.md names as a template, in a stack without a vocoder's file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.constants import HOP_SAMPLES, SAMPLE_RATE, TOKEN_MEL_RATIO
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.base import VocoderOptions
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.memory import Networks
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.token2wav.vocoder import sine_vocoder
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.features import mel_spectrogram
from cosyvoice_triton.voice.prompt import Prompt

STACK = replace(stacks.UNET, hift="", vocoder_loader="cosyvoice_triton.token2wav.vocoder.sine_vocoder:load")
LIMITS = BatchLimits(max_streams=2, chunk_boundary=STACK.chunk_boundary)


def test_its_speech_has_the_mel_that_it_was_given() -> None:
    vocoder = sine_vocoder.load(Path(), VocoderOptions(device="cpu", dtype=torch.float32, limits=LIMITS, graphs=False))
    recording = load_audio(samples.FOLDER / "reference_en.wav", SAMPLE_RATE)
    mel = mel_spectrogram(torch.from_numpy(recording)[None])[0]
    (speech,) = vocoder.whole([mel])
    made = mel_spectrogram(speech[None])[0]
    loud = mel > -5
    assert np.corrcoef(made[loud], mel[loud])[0, 1] > 0.9 and abs(float((made - mel)[loud].mean())) < 0.5


def test_a_stack_without_a_vocoders_file_is_rendered_in_chunks_that_are_the_whole(tmp_path: Path) -> None:
    (tmp_path / STACK.flow).symlink_to(TRAINED / stacks.UNET.checkpoint / STACK.flow)
    assert STACK.files == (STACK.flow, STACK.speaker_encoder, STACK.speech_tokenizer)
    sizes = {"flow_size": 4, "vocoder_size": 4, "steps": 10}
    with_hift = Networks.read(stacks.UNET, TRAINED / stacks.UNET.checkpoint, **sizes)
    assert Networks.read(STACK, tmp_path, **sizes).weights < with_hift.weights
    precision = Precision(torch.float32, torch.float32)
    engine = Token2Wav.load(STACK, tmp_path, device="cpu", limits=LIMITS, precision=precision)
    engine.warm_up()
    random = np.random.default_rng(1)
    tokens = random.integers(0, 6561, 60)
    voice = Prompt(tokens[:25], np.full((50, 80), -4, np.float32), np.ones(192, np.float32), "")
    assert engine.whole(voice, tokens).size == len(tokens) * TOKEN_MEL_RATIO * HOP_SAMPLES
    streams = [engine.open(voice) for _ in range(2)]
    once = engine.step([engine.chunk(streams[0], tokens, final=True)])[0]
    parts = [engine.step([engine.chunk(streams[1], tokens[:end], final=end == 60)])[0] for end in (28, 53, 60)]
    assert once.size == sum(part.size for part in parts) == len(tokens) * TOKEN_MEL_RATIO * HOP_SAMPLES
    assert np.abs(once[: parts[0].size] - parts[0]).max() < 1e-3 * np.abs(once).max()
