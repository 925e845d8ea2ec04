"""Mixed voices: their names, and the arithmetic of x-vectors."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from cosyvoice_triton.constants import SPEAKER_DIM
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.files import save_voice
from cosyvoice_triton.voice.mix import MAX_MIX_CHARS, Mix, mixed_voices
from cosyvoice_triton.voice.prompt import Prompt

from tests.support.fakes import fake_prompt


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
