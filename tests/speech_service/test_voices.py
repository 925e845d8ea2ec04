"""Registered voices: added, listed, used by name and deleted through the service, with a stub Triton."""

import contextlib
import io
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.voices import VoiceFolder
from cosyvoice_triton.voice.files import read_voice, save_recording
from cosyvoice_triton.voice.prompt import Recording

from tests.support.speech_fixtures import SPEECH, TEXT, StubbedService, recording, serving
from tests.support.triton_stub import texts_of


def noise() -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.5, 16_000).astype(np.float32)


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
        save_recording(served.voices / f"{name}.safetensors", Recording(noise(), "Hi."))
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
        save_recording(tmp_path / f"{name}.safetensors", Recording(noise(), "Hi."))
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
    file, _ = sf.read(io.BytesIO(recording(1.0)))
    late = io.BytesIO()
    sf.write(late, np.concatenate([np.zeros(SAMPLE_RATE), file, np.zeros(SAMPLE_RATE // 4)]), SAMPLE_RATE, format="WAV")
    for form, seconds in (({}, 2.25), ({"trim_reference": "true"}, 1.4)):
        answer = served.add("late", late.getvalue(), **form).json()
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
    ],
)
def test_an_invalid_voice_is_rejected(served: StubbedService, name: str, data: bytes | None, param: str) -> None:
    fields = {"name": name, "ref_text": "?!" if name == "mute" else "Hi."}
    fields |= {"pronunciation": "nginx"} if name == "misspelled" else {}
    files = {"audio_sample": ("a.wav", data)} if data is not None else {"other": ("a", b"x")}
    answer = httpx.post(f"{served.url}/v1/audio/voices", data=fields, files=files)
    error = answer.json()["error"]
    assert answer.status_code == 400 and param in (error["param"], error["message"].partition(": ")[2]), answer.text
    assert list(served.voices.iterdir()) == []


def test_of_two_services_with_one_folder_one_adds_a_voice_and_its_transcript(tmp_path: Path) -> None:
    def add(folder: VoiceFolder, name: str, seconds: int) -> int:
        with contextlib.suppress(ApiError):
            folder.add(name, recording(seconds), f"This takes {seconds} s.")
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
