"""Registered voices: added, listed, used by name and deleted through the service, with a stub Triton; whose consent is
stored, who may add how many, and what is left of a deleted one."""

import contextlib
import dataclasses
import gc
import io
import json
import pickle
import re
import resource
import weakref
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.security.guard import key_name
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.voices import NewVoice, VoiceFolder
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.files import read_voice, save_voice
from cosyvoice_triton.voice.prompt import Prompt, Recording
from cosyvoice_triton.voice.rights import Rights
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

from tests.support.fakes import fake_prompt
from tests.support.sounds import flac, recording, sine, sound_file
from tests.support.speech_fixtures import SPEECH, TEXT, StubbedService, serving
from tests.support.triton_stub import texts_of


def names_of(url: str) -> list[str]:
    """Of the registered voices."""
    listed = httpx.get(f"{url}/v1/audio/voices").json()["voices"]
    return [voice["id"] for voice in listed if "alias_of" not in voice]


def test_open_webui_gets_its_lists_of_voices_and_models_and_speech(served: StubbedService) -> None:
    """It reads `id` and `name` of each entry of `voices` and `models`, see docs/recipes/open_webui.md."""
    listed = httpx.get(f"{served.url}/v1/audio/models").json()
    names = [model["name"] for model in listed["models"]]
    assert names == ["cosyvoice2_dit", "tts-1", "tts-1-hd", "gpt-4o-mini-tts"] and listed["max_input_chars"] == 4096
    assert [model["languages"] for model in listed["models"]] == [["zh", "en", "ja", "ko"]] * 4
    for name in ("anna", "bert"):  # placed by the operator: aliases stand for no others
        save_voice(served.voices / f"{name}.safetensors", Recording(sine(440, rate=16_000), "Hi."))
    try:
        answer = httpx.get(f"{served.url}/v1/audio/voices").json()
        assert answer["data"] == answer["voices"]
        assert {voice["id"]: voice["name"] for voice in answer["voices"]}.keys() >= {"anna", "bert", "alloy", "echo"}
        aliases = {voice["id"]: voice["alias_of"] for voice in answer["voices"] if "alias_of" in voice}
        assert (aliases["alloy"], aliases["ash"], aliases["ballad"]) == ("anna", "bert", "anna")
        user = {"authorization": "Bearer none", "x-openwebui-user-name": "Zoe", "x-openwebui-user-role": "admin"}
        wanted = {"input": "Hello.", "voice": "alloy", "model": "tts-1", "speed": 1.2}
        spoken = served.post(wanted, headers=user)
        assert (spoken.status_code, spoken.headers["content-type"]) == (200, "audio/mpeg")
    finally:
        for name in ("anna", "bert"):
            served.remove(name)
    assert httpx.get(f"{served.url}/v1/audio/voices").json()["voices"] == []


def test_aliases_can_be_chosen_and_a_registered_voice_comes_first(tmp_path: Path) -> None:
    settings = Settings(voices_dir=tmp_path, voice_aliases=("nova=bert", "echo=nobody", "alloy", "anna=bert"))
    voices = VoiceFolder(tmp_path, 1 << 20, settings.voice_aliases)
    for name in ("anna", "bert"):
        save_voice(tmp_path / f"{name}.safetensors", Recording(sine(440, rate=16_000), "Hi."))
    assert voices.aliases() == {"nova": "bert", "alloy": "anna"}
    assert [voices.resolve(name) for name in ("nova", "anna", "echo", "other")] == ["bert", "anna", "echo", "other"]


def test_a_voice_is_added_used_and_deleted(served: StubbedService) -> None:
    answer = served.add("zöe", recording(1.5, 48_000, kind="FLAC"), ref_text="Hi.")
    assert answer.status_code == 201 and answer.json()["seconds"] == 1.5, answer.text
    cut, warning = answer.json()["warnings"]
    assert cut.startswith("the recording ends inside a word")
    assert warning.startswith("the recording speaks for 1.5 s, but its transcript takes about 0.5 s")
    assert "zöe" in names_of(served.url)
    stored = read_voice(served.voices / "zöe.safetensors")
    assert isinstance(stored, Recording) and (stored.wav.size, stored.rate, stored.text) == (72_000, 48_000, "Hi.")
    with serving(Settings(urls=("127.0.0.1:1",), voices_dir=served.voices)) as restarted:
        assert "zöe" in names_of(restarted)
    assert served.add("zöe").status_code == 409
    assert served.remove("zöe").json()["deleted"]
    assert list(served.voices.iterdir()) == []
    assert served.remove("zöe").status_code == 404


def test_a_recording_is_trimmed_only_if_the_form_asks_for_it(served: StubbedService) -> None:
    spoken, _ = sf.read(io.BytesIO(recording(1.0)))
    late = sound_file(np.concatenate([np.zeros(SAMPLE_RATE), spoken, np.zeros(SAMPLE_RATE // 4)]))
    for form, seconds in (({}, 2.25), ({"trim_reference": "true"}, 1.4)):
        answer = served.add("late", late, **form).json()
        assert answer["seconds"] == pytest.approx(seconds, abs=0.03)
        assert any("silence at its beginning" in each for each in answer.get("warnings", ())) == (not form)
        assert served.remove("late").status_code == 200


def test_a_voice_speaks_as_it_was_registered_unless_a_request_says_how(served: StubbedService) -> None:
    for name, style in ("plain", {}), ("soft", {"instructions": "Softly."}):
        assert served.add(name, ref_text="Hi.", **style).status_code == 201
        own = {"instruct_text": "Softly."} if style else {}
        for more, texts in (
            ({}, {"reference_text": "Hi.", **own}),
            ({"language": "zh"}, own),
            ({"instructions": "Slowly."}, {"instruct_text": "Slowly."}),
            ({"trim_reference": True}, {"reference_text": "Hi.", **own}),
        ):
            assert served.post({**TEXT, "voice": name, **more}).status_code == 200
            assert ("trim_reference" in served.stub.requests[-1].parameters) == ("trim_reference" in more)
            assert texts_of(served.stub.requests[-1]) == {"target_text": "Hello.", **texts}
    upload = {"files": {"ref_audio": recording(1.0)}, "data": {**TEXT, "ref_text": "Hi.", "instructions": "Slowly."}}
    assert httpx.post(served.url + SPEECH, **upload).status_code == 200
    assert texts_of(served.stub.requests[-1])["reference_text"] == "Hi."  # the models say what they leave out
    assert [served.remove(name).status_code for name in ("plain", "soft")] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
def test_a_voice_has_its_own_loudness_unless_a_request_says_another(served: StubbedService, stream: bool) -> None:
    for name, own in ("plain", {}), ("quiet", {"loudness": "-40"}):
        assert served.add(name, **own).status_code == 201

    def spoken(text: str, **fields: object) -> np.ndarray:
        return np.frombuffer(served.post({**TEXT, "stream": stream, "input": text, **fields}).content, "<i2")

    plain, quiet, louder = spoken("A.", voice="plain"), spoken("A.", voice="quiet"), spoken("A.", loudness=-30)
    assert 0 < np.abs(quiet).max() < np.abs(louder).max() < np.abs(plain).max()
    np.testing.assert_array_equal(spoken("A.", voice="quiet", loudness=-30), louder)
    both = spoken("[voice:quiet]A.[voice:plain]A.[voice:quiet]A.")
    np.testing.assert_array_equal(both, np.concatenate([quiet, plain, quiet]))
    for name in ("plain", "quiet"):
        served.remove(name)
    assert served.add("loud", loudness="-5").json()["error"]["param"] == "loudness"


def test_words_of_the_request_then_of_the_voice_then_of_all_are_sent_with_a_recording(served: StubbedService) -> None:
    words = "nginx = of the voice\nb = of the voice"
    assert served.add("speller", pronunciation=words).status_code == 201
    (served.voices / "pronunciation.txt").write_text("b = of all\nc = of all")
    try:
        for body in (
            {"json": {**TEXT, "voice": "speller", "pronunciation": {"nginx": "of the request"}}},
            {"data": {**TEXT, "voice": "speller", "pronunciation": "nginx = of the request"}},
        ):
            assert httpx.post(served.url + SPEECH, **body).status_code == 200
            words = json.loads(served.stub.requests[-1].parameters["pronunciation"].string_param)
            assert words == {"nginx": "of the request", "b": "of the voice", "c": "of all"}
        (served.voices / "pronunciation.txt").write_text("b")
        error = served.post({**TEXT, "voice": "speller"})
        assert error.status_code == 503 and "pronunciation.txt, line 1: 'b' is not" in error.text
    finally:
        (served.voices / "pronunciation.txt").unlink()
    assert served.remove("speller").status_code == 200
    assert list(served.voices.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "data", "param"),
    [
        ("../up", recording(), "name"),
        ("", recording(), "name"),
        (".hidden", recording(), "name"),
        ("short", recording(0.2), "audio_sample"),
        ("noise", b"no sound at all", "audio_sample"),
        ("none", None, "upload the file as audio_sample"),
        ("mute", recording(), "ref_text"),
        ("pronunciation", recording(), "name"),
        ("misspelled", recording(), "pronunciation"),
        ("halved", recording(), "pronunciation"),
    ],
)
def test_an_invalid_voice_is_rejected(served: StubbedService, name: str, data: bytes | None, param: str) -> None:
    fields = {"name": name, "ref_text": "?!" if name == "mute" else "Hi."}
    words = {"misspelled": "nginx", "halved": '{"a": "\\ud800"}'}
    fields |= {"pronunciation": words[name]} if name in words else {}
    files = {"audio_sample": ("a.wav", data)} if data is not None else {"other": ("a", b"x")}
    answer = httpx.post(f"{served.url}/v1/audio/voices", data=fields, files=files)
    error = answer.json()["error"]
    assert answer.status_code == 400 and param in (error["param"], error["message"].partition(": ")[2]), answer.text
    assert list(served.voices.iterdir()) == []


def test_of_two_services_with_one_folder_one_adds_a_voice_and_its_transcript(tmp_path: Path) -> None:
    def add(folder: VoiceFolder, name: str, seconds: int) -> int:
        with contextlib.suppress(ApiError):
            folder.add(NewVoice(name=name, ref_text=f"This takes {seconds} s."), recording(seconds))
            return seconds
        return 0

    folders = [VoiceFolder(tmp_path, 1 << 20) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for name in map(str, range(10)):
            none, seconds = sorted(pool.map(add, folders, (name, name), (1, 2)))
            stored = read_voice(tmp_path / f"{name}.safetensors")
            assert isinstance(stored, Recording) and not none
            assert (stored.text, stored.seconds) == (f"This takes {seconds} s.", seconds)


def test_a_voice_that_cannot_be_stored_leaves_nothing_behind(served: StubbedService) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, before[1]))  # as on a full disk, writing fails in the middle
    try:
        answer = served.add("anna", ref_text="Hi.")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert answer.status_code == 507 and "cannot be stored" in answer.text
    assert list(served.voices.iterdir()) == []


def test_a_damaged_voice_is_unavailable_and_other_requests_work(served: StubbedService) -> None:
    damaged = served.voices / "torn.safetensors"
    damaged.write_bytes(b"not safe")
    try:
        items = [{**TEXT, "voice": "torn"}, TEXT]
        assert served.post(items[0]).status_code == 503
        assert served.post({"items": items}, f"{SPEECH}/batch").json()["succeeded"] == 1
    finally:
        damaged.unlink()


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


@pytest.mark.parametrize("name", ["alloy", "nezumi(2)+kumo(1)", "a+b", "C++", "\uff41lloy"])
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


def test_nothing_is_left_of_a_deleted_voice(folder: Path) -> None:
    voices = VoiceFolder(folder, 1 << 20)
    voices.add(NewVoice(name="anna", pronunciation={"nginx": "engine x"}), recording())
    kept = weakref.ref(voices.get("anna"))
    gc.collect()
    assert kept() is not None
    voices.remove("anna")
    gc.collect()
    assert kept() is None and not list(folder.iterdir())
