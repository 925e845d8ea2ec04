"""Voices with rights: whose consent is stored, who may add how many, and what is left of a deleted one."""

import dataclasses
import gc
import io
import json
import pickle
import re
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from cosyvoice_triton.speech_service.security.guard import key_name
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.voices import VoiceFolder
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.files import save_voice
from cosyvoice_triton.voice.prompt import Prompt, Recording
from cosyvoice_triton.voice.rights import Rights
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

from tests.support.bombs import flac
from tests.support.fakes import fake_prompt
from tests.support.speech_fixtures import recording, serving

CONSENT = "Anna agreed on 3 May:\nhttps://example.org/anna.pdf"
VOICES = "/v1/audio/voices"


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
    assert add(service, "bert", "second", transcript="Hello.").json()["warnings"][-1] == (
        "the field 'transcript' is unknown and was left out"
    )
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


def load(service: httpx.Client, data: bytes, key: str = "first", **fields: str) -> httpx.Response:
    files = {"file": ("voice.zip", data)}
    return service.post(f"{VOICES}/import", data=fields, files=files, headers=bearer(key))


def test_a_voice_is_exported_and_imported_as_one_file(service: httpx.Client, folder: Path) -> None:
    add(service, "anna", consent=CONSENT, ref_text="Hello.", pronunciation="nginx = engine x")
    file = service.get(f"{VOICES}/anna/export")
    assert file.headers["content-type"] == "application/zip" and "anna.zip" in file.headers["content-disposition"]
    assert load(service, file.content).status_code == 409  # the name is taken
    copy = load(service, file.content, "second", name="copy").json()
    assert (copy["id"], copy["consent"], copy["created_by"]) == ("copy", CONSENT, key_name("second"))
    book = VoiceBook(folder, folder, str)
    first, second = book.get("anna"), book.get("copy")
    assert isinstance(first, Recording) and isinstance(second, Recording)
    assert second.digest == first.digest and second.text == "Hello."
    assert book.pronunciation("copy") == {"nginx": "engine x"}


def test_only_the_key_that_registered_a_voice_exports_and_deletes_it(service: httpx.Client, folder: Path) -> None:
    add(service, "anna")
    save_voice(folder / "placed.safetensors", fake_prompt(1))
    for ask in (lambda path, **how: service.get(f"{path}/export", **how), service.delete):
        theirs = ask(f"{VOICES}/anna", headers=bearer("second"))
        assert theirs.status_code == 403 and key_name("first") in theirs.json()["error"]["message"]
        nobodys = ask(f"{VOICES}/placed")
        assert nobodys.status_code == 403 and "was not added with an API key" in nobodys.json()["error"]["message"]
        assert ask(f"{VOICES}/nobody").status_code == 404
        assert "alias of the voice" in ask(f"{VOICES}/alloy").json()["error"]["message"]
    assert {"anna", "placed"} <= {each["id"] for each in service.get(VOICES).json()["data"]}
    assert service.delete(f"{VOICES}/anna").status_code == 200


def hidden(prompt: Prompt) -> bytes:
    """A voice's file with a needless tensor, whose name makes the header so long that nobody would find the owner."""
    tensors = {"prompt_speech_tokens": prompt.tokens, "prompt_speech_feat": prompt.mel}
    tensors |= {"prompt_spk_embedding": prompt.embedding, "reference_text": np.zeros(0, np.uint8)}
    return save({**tensors, "x" * 70_000: np.zeros(1, np.float32)})


def zipped(members: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as written:
        for name, data in members.items():
            written.writestr(name, data)
    return file.getvalue()


ABOUT = json.dumps({"name": "anna"}).encode()
GOOD = {"voice.json": ABOUT, "recording.wav": recording()}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a zip"),
        (zipped(GOOD)[:-1], "not a zip"),
        (zipped(GOOD)[:-22] + b"PK\6\7" + bytes(16) + zipped(GOOD)[-22:], "not a zip"),
        (zipped({f"{number:0200}": b"" for number in range(20)}), "not a zip"),
        (zipped(GOOD)[200:], "cannot be used"),
        (zipped({**GOOD, "../evil": b""}), "other members"),
        (zipped({"voice.json": ABOUT, "../recording.wav": recording()}), "other members"),
        (zipped({"voice.json": ABOUT}), "other members"),
        (zipped({"voice.json": b" " * (3 << 20), "recording.wav": recording()}), "more than 2097152 bytes"),
        (zipped({"voice.json": ABOUT, "recording.wav": bytes(30 << 20)}), "recording.wav has more than"),
        (zipped(GOOD, zipfile.ZIP_LZMA), "another way than by deflate"),
        (zipped({**GOOD, "voice.json": b"[" * 100_000}), "not JSON"),
        (zipped({**GOOD, "voice.json": b"[]"}), "is a list"),
        (zipped({**GOOD, "voice.json": b'{"name": 5}'}), "name in voice.json"),
        (zipped({**GOOD, "voice.json": b'{"name": "../up"}'}), "not a valid name"),
        (zipped({**GOOD, "voice.json": b'{"name": "a", "consent": "\\ud800"}'}), "consent in voice.json"),
        (zipped({**GOOD, "voice.json": b'{"name": "a", "pronunciation": [1]}'}), "pronunciation"),
        (zipped({**GOOD, "recording.wav": b"no sound"}), "recording.wav: the recording is not a readable audio file"),
        (zipped({**GOOD, "recording.wav": flac(6)}), "recording.wav: the recording's sample rate is 6"),
        (zipped({**GOOD, "voice.json": b'{"name": "alloy"}'}), "'alloy' is reserved"),
        (zipped({"voice.json": ABOUT, "voice.safetensors": hidden(fake_prompt(1))}), "has a header of 7.* bytes"),
        (
            zipped({"voice.json": ABOUT, "voice.safetensors": pickle.dumps({"a": 1})}),
            "voice.safetensors has a header of",
        ),
    ],
)
def test_a_hostile_file_is_refused(service: httpx.Client, folder: Path, data: bytes, message: str) -> None:
    answer = load(service, data)
    assert answer.status_code == 400 and re.search(message, answer.json()["error"]["message"]), answer.text
    assert not folder.exists() or not list(folder.iterdir())


def test_of_an_imported_voice_only_what_a_voice_has_is_kept(service: httpx.Client, folder: Path) -> None:
    save_voice(folder / "placed.safetensors", dataclasses.replace(fake_prompt(1, "Hello."), rate=24_000))
    tensors = load_tensors((folder / "placed.safetensors").read_bytes())
    needless = {"more": np.zeros(1 << 20, np.float32), "prompt_speech_tokens": tensors["prompt_speech_tokens"][None]}
    data = zipped({"voice.json": ABOUT, "voice.safetensors": save({**tensors, **needless})})
    assert load(service, data).status_code == 201
    assert (folder / "anna.safetensors").stat().st_size < 100_000
    kept = load_tensors((folder / "anna.safetensors").read_bytes())
    assert kept.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(kept[name], value)
    assert service.get(VOICES).json()["data"][0]["created_by"] == key_name("first")


def test_the_voices_of_a_key_have_a_limit_of_bytes(service: httpx.Client, folder: Path) -> None:
    """Of two voices together it is 4 MiB, and a recording of 30 s at 48 kHz has 5.8 MB."""
    files = {"audio_sample": ("a.wav", recording(30.0, 48_000))}
    assert service.post(VOICES, data={"name": "long"}, files=files).status_code == 201
    refused = add(service, "short")
    assert refused.status_code == 409 and "or of 4 MiB of them, is reached: there are 1 of 5 MiB" in refused.text
    assert add(service, "short", "second").status_code == 201


@pytest.mark.parametrize("name", ["alloy", "slt(2)+rms(1)", "a+b", "C++", "\uff41lloy"])
def test_names_that_mean_something_else_are_reserved(service: httpx.Client, name: str) -> None:
    answer = add(service, name)
    assert answer.status_code == 400 and "is reserved" in answer.text and answer.json()["error"]["param"] == "name"


def test_voices_of_callers_change_no_alias_and_no_default_voice(service: httpx.Client, folder: Path) -> None:
    save_voice(folder / "placed.safetensors", fake_prompt(1))
    before = {each["id"]: each.get("alias_of") for each in service.get(VOICES).json()["data"]}
    assert before["alloy"] == before["ash"] == "placed"
    assert add(service, "a stranger").status_code == 201
    after = {each["id"]: each.get("alias_of") for each in service.get(VOICES).json()["data"]}
    assert after == before | {"a stranger": None}
    default = VoiceBook(folder, folder, str).get()
    assert isinstance(default, Prompt) and default.digest == fake_prompt(1).digest


def test_a_consent_is_for_the_owner_alone(service: httpx.Client, folder: Path) -> None:
    add(service, "anna", consent=CONSENT)
    theirs = service.get(VOICES, headers=bearer("second")).json()["data"][0]
    assert theirs["id"] == "anna" and "consent" not in theirs
    with serving(Settings(urls=("127.0.0.1:1",), voices_dir=folder)) as url:  # without keys nobody is the owner
        assert "consent" not in httpx.get(url + VOICES).text
        exported = zipfile.ZipFile(io.BytesIO(httpx.get(f"{url}{VOICES}/anna/export").content))
        assert json.loads(exported.read("voice.json"))["consent"] == ""
        data, files = {"name": "b", "consent": CONSENT}, {"audio_sample": ("a.wav", recording())}
        added = httpx.post(url + VOICES, data=data, files=files).json()
        assert added["created_by"] == "anyone" and "consent" not in added
        assert Rights.read(folder / "b.safetensors").consent == CONSENT  # for the operator
    assert "was not added with an API key" in service.delete(f"{VOICES}/b").text


def test_a_voice_that_cannot_be_stored_as_a_whole_is_not_stored(service: httpx.Client, folder: Path) -> None:
    answer = add(service, "anna", pronunciation='{"a": "\\ud800"}')
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "pronunciation"
    assert not folder.exists() or not list(folder.iterdir())


def test_nothing_is_left_of_a_deleted_voice(folder: Path) -> None:
    voices = VoiceFolder(folder, 1 << 20)
    voices.add("anna", recording(), "Hello.", "nginx = engine x", CONSENT, "key")
    kept = weakref.ref(voices.get("anna"))
    gc.collect()
    assert kept() is not None
    voices.remove("anna")
    gc.collect()
    assert kept() is None and not list(folder.iterdir())
