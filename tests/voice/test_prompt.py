"""Prompts as data: checked and aligned when they are built, cached by the samples of their recording. Mixed voices:
their names, and the arithmetic of x-vectors. Which speech tokens are silence."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import MEL_BINS, PROMPT_SAMPLE_RATE, SPEAKER_DIM, TOKEN_RATE
from cosyvoice_triton.demo_checkpoint import STACKS, TRAINED
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.prepare.silence import SPOKEN, heard, renderer
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.encoders import AudioTokenizer
from cosyvoice_triton.voice.files import save_voice
from cosyvoice_triton.voice.mix import MAX_MIX_CHARS, Mix, mixed_voices
from cosyvoice_triton.voice.prompt import Prompt, Recording, RecordingCache
from cosyvoice_triton.voice.silent_tokens import FILE, find_silent_tokens, silent_tokens

from tests.support.fakes import fake_prompt


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


def x_vector(*values: float) -> np.ndarray:
    return np.pad(np.array(values, np.float32), (0, SPEAKER_DIM - len(values)))


def voice(*values: float) -> Prompt:
    return Prompt.aligned(Mix.tokens, Mix.mel, x_vector(*values))


async def no_encoder(wav: np.ndarray) -> np.ndarray:
    raise AssertionError("this voice is encoded already")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a+b", [("a", 1), ("b", 1)]),
        ("a(2)+b(1)", [("a", 2), ("b", 1)]),
        (" 中文女 ( 0.5 ) + Anna B. ", [("中文女", 0.5), ("Anna B.", 1)]),
        ("a(1e+3)+b(1.5e-3)", [("a", 1000), ("b", 0.0015)]),
        ("a (old)(2)+a", [("a (old)", 2), ("a", 1)]),
        ("a+b+c+d", [(each, 1) for each in "abcd"]),
        *((name, []) for name in ("", "a", "a(2)", "a (b+c)", "a+" * MAX_MIX_CHARS)),
    ],
)
def test_the_voices_of_a_mix_are_named_with_their_weights(name: str, parts: list[tuple[str, float]]) -> None:
    assert mixed_voices(name) == parts


INVALID = {
    "a+b+c+d+e": "speaker 'a+b+c+d+e' mixes 5 voices, more than 4",
    "a+": "speaker 'a+' mixes a voice without a name",
    "(2)+a": "without a name",
    **{
        f"a+b({weight})": f"the weight '{weight}' of 'b' is not a number above 0"
        for weight in ("0", "-1", "nan", "inf", "1e999", "two", "")
    },
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_mix_is_refused_with_its_value(name: str) -> None:
    with pytest.raises(ValueError) as refused:
        mixed_voices(name)
    assert INVALID[name] in str(refused.value)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(voice(3), 1.0), (voice(0, 5), 1.0)], (0.5, 0.5)),  # the lengths of the x-vectors do not matter
        ([(voice(3), 3.0), (voice(0, 5), 1.0)], (0.75, 0.25)),
        ([(voice(3, 4), 2.0), (voice(3, 4), 0.5)], (0.6, 0.8)),
        ([(voice(1), 1e308), (voice(0, 1), 1e308), (voice(0, 0, 1), 1e-320)], (0.5, 0.5, 0)),
        ([(voice(1), 1.0), (voice(0), 1.0)], (0.5,)),  # an x-vector of zeros has no direction
    ],
)
def test_the_x_vector_is_the_weighted_mean_of_unit_vectors(parts, expected) -> None:
    np.testing.assert_allclose(
        asyncio.run(Mix(parts).embedding(no_encoder)), x_vector(*expected), atol=1e-12, rtol=1e-6
    )


def test_a_mix_is_looked_up_voice_by_voice_and_a_registered_name_comes_first(tmp_path: Path) -> None:
    for name, value in {"anna": 1, "bert": 2, "anna+bert": 3}.items():
        save_voice(tmp_path / f"{name}.safetensors", fake_prompt(value))
    (tmp_path / "damaged.safetensors").write_bytes(b"")
    book = VoiceBook(tmp_path, tmp_path, str, default="bert+anna(2)")
    for name in ("bert+anna(2)", None):
        mix = book.get(name)
        assert isinstance(mix, Mix)
        assert [(each.embedding[0], weight) for each, weight in mix.parts] == [(2, 1), (1, 2)]  # type: ignore[union-attr]
    registered = book.get("anna+bert")
    assert isinstance(registered, Prompt) and registered.embedding[0] == 3
    with pytest.raises(
        ValueError, match=r"unknown speaker 'carl' in 'anna\+carl', whose .*; known speakers: anna, anna\+bert, bert"
    ):
        book.get("anna+carl")
    with pytest.raises(ValueError, match="unknown speaker 'anna.2.'"):
        book.get("anna(2)")
    with pytest.raises(UnavailableError, match="speaker 'damaged' cannot be used"):
        book.get("anna+damaged")


TOKEN = PROMPT_SAMPLE_RATE // TOKEN_RATE


def by_loudness(waves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A tokenizer whose ids are the levels of tokens, in steps of 10 dB below full scale."""
    powers = [np.square(wave[: len(wave) // TOKEN * TOKEN]).reshape(-1, TOKEN).mean(axis=1) for wave in waves]
    return [np.clip(-np.log10(power + 1e-12), 0, 12).astype(np.int64) for power in powers]


def test_what_is_heard_around_speech_and_not_in_it_is_silent() -> None:
    found = find_silent_tokens(by_loudness)
    assert found and 12 in found, "digital silence"
    assert not found & set(range(5)), "-50 dBFS is noise of the louder recording and speech of the other"


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_the_demo_voice_has_those_that_its_tokenizer_gives(
    stack: stacks.Stack, demo_files: Path, tmp_path: Path
) -> None:
    shipped = demo_files / stack.checkpoint
    expected = silent_tokens(shipped, stack)
    assert {3400, 5340} <= expected, "what its answers begin with"
    shutil.copy(shipped / stack.speech_tokenizer, tmp_path)
    stack = replace(stack, silent_tokens=frozenset())  # those of the official tokenizer
    assert silent_tokens(tmp_path, stack) == expected == find_silent_tokens(AudioTokenizer(shipped))
    assert set(json.loads((tmp_path / FILE).read_text())) == expected, "kept beside the checkpoint"


def test_tokens_that_are_heard_when_they_are_rendered_are_not_silent() -> None:
    prompt, render = renderer(TRAINED / stacks.UNET.checkpoint, stacks.UNET)
    spoken = prompt.tokens[SPOKEN]
    vowels = {623, 3310, 4133}
    assert vowels <= set(prompt.tokens.tolist()) and heard(vowels | {861, 3400, 5340}, spoken, render) == vowels


def test_the_list_of_a_stack_and_a_file_are_taken_without_the_tokenizer(tmp_path: Path) -> None:
    assert silent_tokens(tmp_path, stacks.COSYVOICE3) == stacks.COSYVOICE3.silent_tokens
    assert silent_tokens(tmp_path, stacks.DIT) == frozenset()
    (tmp_path / FILE).write_text("[3, 5]")
    assert silent_tokens(tmp_path, stacks.COSYVOICE3) == {3, 5}
