"""Which speech tokens are silence."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.demo_checkpoint import STACKS, TRAINED
from cosyvoice_triton.prepare.silence import SPOKEN, heard, renderer
from cosyvoice_triton.voice.encoders import AudioTokenizer
from cosyvoice_triton.voice.silent_tokens import FILE, find_silent_tokens, silent_tokens

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
    assert {5832, 5913, 5994} <= expected, "what its answers begin with"
    shutil.copy(shipped / stack.speech_tokenizer, tmp_path)
    stack = replace(stack, silent_tokens=frozenset())  # those of the official tokenizer
    assert silent_tokens(tmp_path, stack) == expected == find_silent_tokens(AudioTokenizer(shipped))
    assert set(json.loads((tmp_path / FILE).read_text())) == expected, "kept beside the checkpoint"


def test_tokens_that_are_heard_when_they_are_rendered_are_not_silent() -> None:
    prompt, render = renderer(TRAINED / stacks.UNET.checkpoint, stacks.UNET)
    spoken = prompt.tokens[SPOKEN]
    vowels = {34, 88, 5651}
    assert vowels <= set(prompt.tokens.tolist()) and heard(vowels | {3726, 5832, 5994}, spoken, render) == vowels


def test_the_list_of_a_stack_and_a_file_are_taken_without_the_tokenizer(tmp_path: Path) -> None:
    assert silent_tokens(tmp_path, stacks.COSYVOICE3) == stacks.COSYVOICE3.silent_tokens
    assert silent_tokens(tmp_path, stacks.DIT) == frozenset()
    (tmp_path / FILE).write_text("[3, 5]")
    assert silent_tokens(tmp_path, stacks.COSYVOICE3) == {3, 5}
