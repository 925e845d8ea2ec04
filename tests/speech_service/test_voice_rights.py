"""Voices with rights: whose consent is stored, who may add how many, and what is left of a deleted one."""

import gc
import io
import weakref
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.speech_service.security.guard import key_name
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.voices import VoiceFolder

from tests.support.speech_fixtures import serving

CONSENT = "Anna agreed on 3 May:\nhttps://example.org/anna.pdf"
VOICES = "/v1/audio/voices"


def recording() -> bytes:
    file = io.BytesIO()
    sf.write(file, np.sin(np.arange(24_000) / 9) / 2, 24_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "voices"


@pytest.fixture
def service(folder: Path) -> Iterator[httpx.Client]:
    """A client of a service with two keys, each of which may register two voices; it has the first one."""
    settings = Settings(urls=("127.0.0.1:1",), voices_dir=folder, api_keys=("first", "second"), max_voices=2)
    with serving(settings) as url, httpx.Client(base_url=url, headers=bearer("first")) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def add(service: httpx.Client, name: str, key: str = "first", **fields: str) -> httpx.Response:
    files = {"audio_sample": ("a.wav", recording())}
    return service.post(VOICES, data={"name": name, **fields}, files=files, headers=bearer(key))


def test_a_consent_is_listed_with_the_key_and_the_time(service: httpx.Client) -> None:
    added = add(service, "anna", consent=CONSENT).json()
    assert add(service, "bert", "second").status_code == 201
    anna, bert = (each for each in service.get(VOICES).json()["data"] if "alias_of" not in each)
    assert anna.items() <= added.items()
    assert (anna["consent"], anna["created_by"]) == (CONSENT, key_name("first")) and anna["created_at"] > 1.7e9
    assert "consent" not in bert and bert["created_by"] == key_name("second")
    too_long = add(service, "carl", consent="a" * 4001)
    assert too_long.status_code == 400 and too_long.json()["error"]["param"] == "consent"


def test_a_key_may_register_so_many_voices_until_it_deletes_one(service: httpx.Client) -> None:
    assert [add(service, name).status_code for name in ("a", "b", "c")] == [201, 201, 409]
    assert add(service, "c", "second").status_code == 201
    assert service.delete(f"{VOICES}/a").status_code == 200
    assert add(service, "d").status_code == 201


def test_nothing_is_left_of_a_deleted_voice(folder: Path) -> None:
    voices = VoiceFolder(folder, 1 << 20)
    voices.add("anna", recording(), "Hello.", "nginx = engine x", CONSENT, "key")
    kept = weakref.ref(voices.get("anna"))
    gc.collect()
    assert kept() is not None
    voices.remove("anna")
    gc.collect()
    assert kept() is None and not list(folder.iterdir())
