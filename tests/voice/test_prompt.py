"""Prompts as data: checked and aligned when they are built, cached by the samples of their recording."""

import subprocess
import sys

import numpy as np
import pytest
from cosyvoice_triton.constants import MEL_BINS, SPEAKER_DIM, SPEECH_VOCAB
from cosyvoice_triton.voice.prompt import Prompt, Recording, RecordingCache


def aligned(count: int, frames: int, **changes: np.ndarray) -> Prompt:
    parts = {
        "tokens": np.arange(count, dtype=np.int32),
        "mel": np.zeros((frames, MEL_BINS), np.float16),
        "embedding": np.zeros(SPEAKER_DIM, np.float16),
    }
    return Prompt.aligned(**(parts | changes), text="hello")


@pytest.mark.parametrize(("tokens", "frames", "length"), [(10, 20, 10), (10, 19, 9), (9, 23, 9), (0, 20, 0)])
def test_prompt_is_cut_to_the_shorter_of_tokens_and_mel(tokens: int, frames: int, length: int) -> None:
    prompt = aligned(tokens, frames)
    assert prompt.tokens.tolist() == list(range(length))
    assert prompt.mel.shape == (2 * length, MEL_BINS)
    assert (prompt.tokens.dtype, prompt.mel.dtype, prompt.embedding.dtype) == (np.int64, np.float32, np.float32)
    assert prompt.text == "hello"


@pytest.mark.parametrize("stray", [-1, SPEECH_VOCAB])
def test_prompt_token_outside_the_codebook_is_named(stray: int) -> None:
    with pytest.raises(ValueError, match=f"token {stray} "):
        aligned(3, 6, tokens=np.array([1, stray, 2]))


@pytest.mark.parametrize(("name", "shape"), [("mel", (6, MEL_BINS)), ("embedding", (SPEAKER_DIM,))])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_prompt_with_values_that_are_no_numbers_is_rejected(name: str, shape: tuple[int, ...], value: float) -> None:
    with pytest.raises(ValueError, match="mel or x-vector has values that are not finite"):
        aligned(3, 6, **{name: np.full(shape, value, np.float16)})


def test_prompt_of_wrong_shapes_is_rejected_with_the_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(6, 79\)"):
        aligned(3, 6, mel=np.zeros((6, 79), np.float32))


def test_the_cache_keeps_what_was_made_of_recently_used_samples_whatever_their_transcript() -> None:
    cache: RecordingCache[Prompt] = RecordingCache(capacity=2)
    waves = [np.full(8000, level, np.float32) for level in (0.1, 0.2, 0.3)]
    prompts = [
        Prompt(np.arange(n), np.zeros((2 * n, MEL_BINS)), np.zeros(SPEAKER_DIM), text="what was said")
        for n in (1, 2, 3)
    ]
    for wave, prompt in zip(waves[:2], prompts[:2], strict=True):
        cache.put(Recording(wave), prompt)
    found = cache.get(Recording(waves[0].copy(), text="in other words"))
    assert found is prompts[0]
    cache.put(Recording(waves[2]), prompts[2])  # the second is the one that was not asked for since
    assert [cache.get(Recording(wave)) is None for wave in waves] == [False, True, False]


def test_prompts_can_be_imported_without_torch() -> None:
    code = "import sys, cosyvoice_triton.voice.prompt\n"
    code += "print([name for name in ('torch', 'onnxruntime') if name in sys.modules])"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.strip() == "[]"
