"""What a downloaded checkpoint is worth: every file is read, every network computes on the CPU, and a second is spoken.

No LLM is asked for that: token2wav speaks the tokens of a sample recording, as in voice conversion.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.checkpoint import read_state, require_finite
from cosyvoice_triton.config import Token2WavConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.checkpoint import HEAD_BIAS, made_from, read_limits
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.networks.flow.config import stated_solve
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.voice.audio import at_rate
from cosyvoice_triton.voice.encoders import AudioTokenizer, ReferenceEncoder
from cosyvoice_triton.voice.features import log_mel
from cosyvoice_triton.voice.prompt import Recording
from cosyvoice_triton.voice.recordings import parse_recording

SAMPLE = samples.FOLDER / "reference_en.wav"
SAMPLE_SECONDS = 3.0  # of it are used
# Of these, and of the solve's steps: a full-size flow takes minutes of one core for all.
SPOKEN_SECONDS, SPOKEN_STEPS = 1.0, 3
# An H100's bfloat16 or another CPU's float32 may turn a token of close logits; wrong weights turn nearly all.
MOST_DIFFERENT = 0.05
FLOAT16_RISK = (
    "risk: float16 overflowed in this flow for others (CosyVoice issue 1930); on a GPU, heed what token2wav logs "
    "of its precision"
)

Line = tuple[bool, str]  # whether the check passed, and what it found


def inspected(options: StackOptions) -> Iterator[Line]:
    """Yield a line for each check of a stack's files, with the seconds that it took."""
    if needed := [path for path in options.missing_files() if path != options.engine_dir]:
        yield from ((False, f"{path} is missing; {options.remedy(path)}") for path in needed)
        return
    stack, folder = stacks.named(options.stack), options.checkpoint_dir
    sample = parse_recording(SAMPLE.read_bytes())
    sample = replace(sample, wav=sample.wav[: round(SAMPLE_SECONDS * sample.rate)])
    checks: dict[str, Callable[[], str]] = {
        "LLM": partial(_llm, options.tokenizer_dir, stack),
        stack.flow: partial(_flow, folder / stack.flow, stack),
        stack.hift: partial(_tensors, folder / stack.hift),
        "prompt and speech": partial(_spoken, folder, stack, sample),
        stack.speech_tokenizer: partial(_tokenizer, folder, stack, sample),
    }
    for name, check in checks.items():
        begun = time.monotonic()
        try:
            passed, found = True, check()
        except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
            passed, found = False, str(error)
        yield passed, f"{name}: {found} ({time.monotonic() - begun:.1f} s)"
    if stack.mel_max_hz > PROMPT_SAMPLE_RATE / 2:
        yield True, FLOAT16_RISK


def _llm(folder: Path, stack: Stack) -> str:
    tokenizer = LLMTokenizer.from_dir(folder, stack.llm.tokenizer)
    rows, count = read_limits(folder).vocab_size, 0
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise ValueError(f"{folder} has no *.safetensors")
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():
                tensor = weights.get_tensor(name)
                if name != HEAD_BIAS:  # which excludes what is no speech by minus infinity
                    require_finite({name: tensor}, file)
                if name.endswith("embed_tokens.weight") and len(tensor) != rows:
                    raise ValueError(f"{file}: {name} has {len(tensor)} rows, and config.json says {rows}")
                count += 1
    return f"{count} tensors of {made_from(folder) or 'unknown origin'}, <|s_0|> is {tokenizer.first_speech_id}"


def _tensors(path: Path) -> str:
    return f"{len(read_state(path))} tensors, {path.stat().st_size / 1e6:.1f} MB, all finite"


def _flow(path: Path, stack: Stack) -> str:
    if (found := stacks.of_flow(read_state(path, "meta"), path)) is not stack:
        raise ValueError(f"{path} is the flow of the stack {found.name}")
    return _tensors(path)


def _spoken(folder: Path, stack: Stack, recording: Recording) -> str:
    """Load all networks but the LLM strictly, clone the sample's first second, and speak its tokens."""
    config = Token2WavConfig(
        model_dir=str(folder),
        device="cpu",
        flow_runtime="torch",
        flow_precision="float32",  # without a check of others
        n_timesteps=None if stated_solve(folder / stack.flow).get("time_grid") else SPOKEN_STEPS,
        vocoder_precision="float32",
        max_streams=1,
    )
    first = replace(recording, wav=recording.wav[: round(SPOKEN_SECONDS * recording.rate)])
    prompt = ReferenceEncoder(stack, folder)(first)
    # Not warmed up: that would render three times as much.
    wave = Token2Wav.from_config(stack, config).whole(prompt, prompt.tokens)
    if not np.isfinite(wave).all() or np.abs(wave).max() < 1e-3:
        raise ValueError("a second of speech is silent or not finite")
    level = 20 * np.log10(np.sqrt(np.mean(np.square(wave))))
    return f"{len(prompt.tokens)} tokens of {SAMPLE.name}; a second of speech at {level:.0f} dBFS"


def _tokenizer(folder: Path, stack: Stack, recording: Recording) -> str:
    """Compare its tokens of the sample with those that onnxruntime computes of the same file."""
    import onnxruntime

    path = folder / stack.speech_tokenizer
    wav = at_rate(recording, PROMPT_SAMPLE_RATE)
    (ours,) = AudioTokenizer(folder, "cpu")([wav])
    mel = log_mel(torch.from_numpy(wav))[None].numpy()  # (1, 128, T)
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        given = dict(zip(names, (mel, np.array([mel.shape[2]], np.int32)), strict=True))
        theirs = session.run(None, given)[0].reshape(-1)
    except Exception as error:  # onnxruntime's own share no base class
        return f"not compared, onnxruntime cannot run the file: {str(error).partition(chr(10))[0][:120]}"
    size = min(len(ours), len(theirs))
    different = float(np.mean(ours[:size] != theirs[:size]))
    if abs(len(ours) - len(theirs)) > 1 or different > MOST_DIFFERENT:
        raise ValueError(f"{different:.0%} of {len(ours)} tokens differ from onnxruntime's {len(theirs)}")
    return f"{size} tokens, {different:.1%} of them not as onnxruntime computes them"
