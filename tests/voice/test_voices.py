"""Registered voices: the file formats, error messages for damaged files, and changes while the server runs."""

import dataclasses
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.voice import book as voices
from cosyvoice_triton.voice.audio import save_audio
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.bundle import export_voice, read_bundle
from cosyvoice_triton.voice.files import is_voice_name, register_voice, save_pronunciation, save_voice
from cosyvoice_triton.voice.prompt import Prompt, Recording
from cosyvoice_triton.voice.rights import UNKNOWN, Rights
from safetensors.torch import save_file

from tests.support.fakes import fake_prompt

TONE = np.sin(np.arange(PROMPT_SAMPLE_RATE) / 9).astype(np.float32)


def decode(ids: object) -> str:
    return f"decoded {ids}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The voices' folder, not created yet; its parent plays the checkpoint's directory."""
    return tmp_path / "voices"


@pytest.fixture
def book(folder: Path, tmp_path: Path) -> VoiceBook:
    return VoiceBook(folder, tmp_path, decode)


def assert_same(voice: Recording | Prompt, expected: Prompt) -> None:
    assert isinstance(voice, Prompt)
    for name in ("tokens", "mel", "embedding"):
        np.testing.assert_array_equal(getattr(voice, name), getattr(expected, name))
        assert getattr(voice, name).dtype == getattr(expected, name).dtype
    assert voice.text == expected.text


def triton_speaker(value: int = 5) -> dict[str, object]:
    """A speaker as upstream's Triton runtime reads it."""
    prompt = fake_prompt(value)
    return {
        "prompt_text": "它说什么",
        "speech_token": torch.from_numpy(prompt.tokens)[None].int(),
        "speech_feat": torch.from_numpy(prompt.mel)[None],
        "embedding": torch.from_numpy(prompt.embedding)[None],
    }


def cosyvoice_speaker(value: int = 6) -> dict[str, object]:
    """A speaker as CosyVoice2 saves it."""
    of = triton_speaker(value)
    return {
        "prompt_text": torch.tensor([[4, 2]], dtype=torch.int32),
        "prompt_text_len": torch.tensor([2]),
        "llm_prompt_speech_token": of["speech_token"],
        "flow_prompt_speech_token": of["speech_token"],
        "prompt_speech_feat": of["speech_feat"],
        "llm_embedding": of["embedding"],
        "flow_embedding": of["embedding"],
    }


@pytest.mark.parametrize(
    ("transcript", "text"), [("\ufeffWhat she\nsays<|s_1|>.\n", "What she says ."), ("", ""), (None, "")]
)
def test_a_recording_of_any_rate_is_a_voice_with_or_without_its_text(transcript, text, folder, book) -> None:
    folder.mkdir()
    save_audio(folder / "anna.wav", TONE, SAMPLE_RATE)
    if transcript is not None:
        (folder / "anna.txt").write_text(transcript, "utf-8")
    voice = book.get("anna")
    assert isinstance(voice, Recording)
    assert (len(voice.wav), voice.rate) == (len(TONE), SAMPLE_RATE)
    assert voice.text == text


HALF = {name: torch.as_tensor(triton_speaker()[name]).bfloat16() for name in ("speech_feat", "embedding")}
# As in the spk2info.pt of upstream's SFT models.
X_VECTOR = dataclasses.replace(fake_prompt(6, ""), tokens=fake_prompt(6).tokens[:0], mel=fake_prompt(6).mel[:0])


@pytest.mark.parametrize("place", ["voices", "checkpoint"])
@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (triton_speaker(5), fake_prompt(5, "它说什么")),
        (triton_speaker(5) | HALF, fake_prompt(5, "它说什么")),
        (cosyvoice_speaker(6), fake_prompt(6, "decoded [4, 2]")),
        *(
            ({key: triton_speaker(6)["embedding"]}, X_VECTOR) for key in ("embedding", "flow_embedding")
        ),  # of SFT models
    ],
)
def test_every_form_of_a_speaker_in_spk2info_is_read_and_can_be_saved(
    entry: dict[str, object], expected: Prompt, place: str, folder: Path, tmp_path: Path, book: VoiceBook
) -> None:
    folder.mkdir()
    torch.save(
        {"中文女": entry, "another": triton_speaker()}, (folder if place == "voices" else tmp_path) / "spk2info.pt"
    )
    voice = book.get("中文女")
    assert_same(voice, expected)
    save_voice(folder / "Anna B. 2_x-y.safetensors", expected)
    assert_same(book.get("Anna B. 2_x-y"), expected)
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("saved", "instruction", "text"),
    [
        ("You are a helpful assistant. 请用广东话表达。<|endofprompt|>", "请用广东话表达。", ""),
        ("You are a helpful assistant. Softly.<|endofprompt|>它说什么", "Softly.", "它说什么"),
        ("You are a helpful assistant.<|endofprompt|>", "", ""),
        ("Softly.<|endofprompt|>它说什么", "Softly.", "它说什么"),
    ],
)
def test_a_voice_keeps_its_instruction_in_every_file(saved, instruction, text, folder, tmp_path) -> None:
    """Upstream instructs a saved speaker only by what was saved with it; CosyVoice3's system words are none."""
    torch.save(
        {"001": triton_speaker() | {"prompt_text": saved}, "002": cosyvoice_speaker(5)}, tmp_path / "spk2info.pt"
    )
    book = VoiceBook(folder, tmp_path, lambda ids: saved)
    folder.mkdir()
    save_audio(folder / "recorded.wav", TONE, SAMPLE_RATE)
    (folder / "recorded.txt").write_text(saved)
    save_voice(folder / "encoded.safetensors", dataclasses.replace(book.get("001"), loudness=-20.5))
    save_voice(folder / "uploaded.safetensors", dataclasses.replace(book.get("recorded"), loudness=-20.5))
    for name in ("001", "002", "encoded", "recorded", "uploaded"):
        voice = book.get(name)
        assert (voice.instruction, voice.text) == (instruction, text), name
        assert voice.loudness == (-20.5 if name in ("encoded", "uploaded") else None)
    for name in ("encoded", "uploaded"):
        voice = read_bundle(export_voice(folder, book, name)).voice
        assert (voice.instruction, voice.text, voice.loudness) == (instruction, text, -20.5)


def test_the_default_voice_is_the_named_one_or_the_speaker_001_of_spk2info_or_the_only_one(folder, tmp_path) -> None:
    book = VoiceBook(folder, tmp_path, decode)
    with pytest.raises(ValueError, match="there is no default voice .*; known speakers: none"):
        book.get()
    save_voice(folder / "anna.safetensors", fake_prompt(3))
    save_pronunciation(folder, "anna", {"nginx": "engine x"})
    assert_same(book.get(), fake_prompt(3))
    assert book.pronunciation(None) == {"nginx": "engine x"}
    save_voice(folder / "001.safetensors", fake_prompt(1))  # registered by a client: not meant for everybody
    with pytest.raises(ValueError, match="no voice: .* known speakers: 001, anna"):
        book.get()
    assert book.pronunciation(None) == {}
    torch.save({"001": triton_speaker(), "002": triton_speaker(2)}, tmp_path / "spk2info.pt")
    assert_same(book.get(), fake_prompt(5, "它说什么"))
    assert_same(VoiceBook(folder, tmp_path, decode, "002").get(), fake_prompt(2, "它说什么"))
    torch.save({"001": 3}, tmp_path / "spk2info.pt")
    with pytest.raises(UnavailableError, match="speaker '001' cannot be used: spk2info.pt, '001' is a int"):
        book.get()


def test_an_encoded_voice_takes_precedence_over_a_recording_and_both_over_spk2info(folder, book) -> None:
    save_voice(folder / "anna.safetensors", fake_prompt(1))
    save_audio(folder / "anna.wav", TONE, PROMPT_SAMPLE_RATE)
    torch.save({"anna": triton_speaker()}, folder / "spk2info.pt")
    assert_same(book.get("anna"), fake_prompt(1))
    (folder / "anna.safetensors").unlink()
    assert isinstance(book.get("anna"), Recording)
    (folder / "anna.wav").unlink()
    assert_same(book.get("anna"), fake_prompt(5, "它说什么"))


def test_voices_can_be_added_changed_and_removed_while_the_server_runs(folder: Path, book: VoiceBook) -> None:
    with pytest.raises(ValueError, match="unknown speaker 'anna'"):
        book.get("anna")
    save_voice(folder / "anna.safetensors", fake_prompt(1))
    assert_same(book.get("anna"), fake_prompt(1))
    save_voice(folder / "anna.safetensors", fake_prompt(2))
    assert_same(book.get("anna"), fake_prompt(2))
    (folder / "anna.safetensors").unlink()
    with pytest.raises(ValueError, match="unknown speaker 'anna'"):
        book.get("anna")
    save_audio(folder / "anna.wav", TONE, PROMPT_SAMPLE_RATE)
    assert book.get("anna").text == ""
    (folder / "anna.txt").write_text("Her text.")
    assert book.get("anna").text == "Her text."
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="unknown speaker 'anna'"):
        book.get("anna")


def test_who_asks_for_the_words_of_a_recording_does_not_wait_for_the_files_of_voices(folder, tmp_path) -> None:
    torch.save({"anna": cosyvoice_speaker()}, tmp_path / "spk2info.pt")
    reading, read = Event(), Event()

    def decode_later(ids: object) -> str:
        reading.set()
        assert read.wait(60)
        return ""

    book = VoiceBook(folder, tmp_path, decode_later)
    with ThreadPoolExecutor() as threads:
        voice = threads.submit(book.get, "anna")
        assert reading.wait(60)
        words = threads.submit(book.pronunciation, Recording(TONE))
        try:
            assert words.result(30) == {}
        finally:
            read.set()
    assert voice.result().text == ""


def test_a_file_is_read_once_and_a_limited_number_is_cached(folder, book, monkeypatch) -> None:
    monkeypatch.setattr(voices, "CACHED_FILES", 3)
    for index in range(5):
        save_voice(folder / f"{index}.safetensors", fake_prompt(index))
    assert book.get("0") is book.get("0")
    first = book.get("0")
    for index in range(1, 5):
        assert_same(book.get(str(index)), fake_prompt(index))
    assert len(book._voices._cache) == 3
    assert book.get("0") is not first


def test_a_voice_whose_words_cannot_be_written_is_not_registered(folder: Path) -> None:
    (folder / "anna.pronunciation.txt").mkdir(parents=True)
    with pytest.raises(OSError, match="anna"):
        register_voice(folder, "anna", Recording(TONE), {"nginx": "engine x"}, UNKNOWN)
    assert not (folder / "anna.safetensors").exists()


def test_a_damaged_file_tells_no_rights(tmp_path: Path) -> None:
    (tmp_path / "anna.safetensors").write_bytes(b"\xff" * 16)  # a header of 16 EiB
    assert Rights.read(tmp_path / "anna.safetensors") == UNKNOWN


def test_words_of_a_voice_come_before_those_of_all_voices(folder: Path, book: VoiceBook, tmp_path: Path) -> None:
    assert book.pronunciation("anna") == {}
    folder.mkdir()
    (folder / "pronunciation.txt").write_text("nginx = of all\nb = of all")
    save_pronunciation(folder, "anna", {"nginx": "hers", "#": "hash = sign"})
    for voice in ("anna", None):
        named = VoiceBook(folder, tmp_path, decode, default="anna")
        assert named.pronunciation(Recording(TONE)) == {"nginx": "of all", "b": "of all"}
        assert named.pronunciation(voice) == {"nginx": "hers", "#": "hash = sign", "b": "of all"}
    for other in ("bert", None, Recording(TONE), "../anna"):
        assert book.pronunciation(other) == {"nginx": "of all", "b": "of all"}
    save_pronunciation(folder, "anna", {})
    assert [file.name for file in folder.iterdir()] == ["pronunciation.txt"]
    (folder / "pronunciation.txt").write_text("nginx = of all\nb")
    with pytest.raises(UnavailableError, match=r"pronunciation\.txt, line 2: 'b' is not"):
        book.pronunciation("anna")


def test_the_error_for_an_unknown_speaker_lists_the_known_ones(folder: Path, tmp_path: Path, book: VoiceBook) -> None:
    with pytest.raises(ValueError, match="unknown speaker 'bert'; known speakers: none$"):
        book.get("bert")
    save_voice(folder / "anna.safetensors", fake_prompt(1))
    save_audio(folder / "carl.wav", TONE, PROMPT_SAMPLE_RATE)
    (folder / "notes.txt").write_text("no voice")
    torch.save({"001": triton_speaker()}, tmp_path / "spk2info.pt")
    with pytest.raises(ValueError, match="unknown speaker 'bert'; known speakers: 001, anna, carl$"):
        book.get("bert")
    for index in range(30):
        save_voice(folder / f"v{index}.safetensors", fake_prompt(1))
    with pytest.raises(ValueError, match="v1, .* and 13 more$"):
        book.get("bert")


ESCAPES = ["../secret", "..", ".", "", "/etc/passwd", "a/b", "..\\secret", "a\x00b", "a\nb", ".hidden", " x", "x" * 200]
ALIKE = ["\uff0e\uff0e\uff0fx", "a\uff0fb", "\u2024x", "a\uff3cb"]  # other signs for a dot and a slash


@pytest.mark.parametrize("name", [*ESCAPES, *ALIKE, "\ud800"])
def test_a_name_cannot_leave_the_folder(name: str, folder: Path, tmp_path: Path, book: VoiceBook) -> None:
    folder.mkdir()
    for place in (tmp_path / "secret.wav", folder / ".hidden.wav"):
        save_audio(place, TONE, PROMPT_SAMPLE_RATE)
    assert not is_voice_name(name)
    with pytest.raises(ValueError, match="unknown speaker .*; known speakers: none$"):
        book.get(name)


def as_bytes(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def write_voice(folder: Path, **changes: torch.Tensor | None) -> None:
    prompt = fake_prompt(1)
    tensors = {
        "prompt_speech_tokens": torch.from_numpy(prompt.tokens).int(),
        "prompt_speech_feat": torch.from_numpy(prompt.mel),
        "prompt_spk_embedding": torch.from_numpy(prompt.embedding),
        "reference_text": as_bytes(b"text"),
    }
    save_file({name: t for name, t in (tensors | changes).items() if t is not None}, folder / "anna.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_speech_feat": None}, "has no prompt_speech_feat"),
        ({"prompt_speech_tokens": torch.full((30,), 6561)}, "token 6561 is not in 0..6560"),
        ({"prompt_speech_tokens": torch.zeros(0)}, "60 mel frames for 0 speech tokens"),
        ({"prompt_speech_tokens": torch.zeros(2), "prompt_speech_feat": torch.zeros(0, 80)}, "0 mel frames for 2 "),
        ({"prompt_speech_tokens": torch.zeros(0), "prompt_speech_feat": torch.zeros(0, 80)}, "transcript 'text' with"),
        ({"prompt_speech_tokens": torch.zeros(751)}, "751 speech tokens, more than 750"),
        ({"prompt_speech_feat": torch.zeros(100, 80)}, "100 mel frames for 30 speech tokens"),
        ({"prompt_speech_feat": torch.zeros(60, 40)}, r"\(60, 40\)"),
        ({"prompt_speech_feat": torch.tensor(1.0)}, "anna.safetensors: "),
        ({"prompt_speech_feat": torch.full((60, 80), torch.nan)}, "not finite"),
        ({"prompt_spk_embedding": torch.full((192,), torch.inf)}, "not finite"),
        ({"prompt_spk_embedding": torch.zeros(8)}, r"\(8,\)"),
        ({"prompt_spk_embedding": torch.tensor(1.0)}, r"anna.safetensors: .*\(1,\)"),
        ({"loudness": torch.tensor([-5.0])}, "loudness -5.0 is not in -40..-10 LUFS"),
        ({"reference_text": as_bytes(b"\xff\xfe")}, "utf-8"),
        ({"reference_text": as_bytes(b"<|s_1|>")}, "its transcript has nothing to speak"),
    ],
)
def test_a_damaged_voice_is_unavailable_with_the_reason(changes, message, folder, book) -> None:
    folder.mkdir()
    write_voice(folder, **changes)
    with pytest.raises(UnavailableError, match=f"speaker 'anna' cannot be used: .*{message}"):
        book.get("anna")
    write_voice(folder)
    assert isinstance(book.get("anna"), Prompt)


def test_recordings_are_validated_and_limited_like_those_of_requests(folder, book, monkeypatch) -> None:
    folder.mkdir()
    for wav, message in ((TONE[:100], "100 samples"), (0 * TONE, "silent"), (np.tile(TONE, 31), "longer than 30 s")):
        save_audio(folder / "anna.wav", wav, PROMPT_SAMPLE_RATE)
        with pytest.raises(UnavailableError, match=f"anna.wav: .*{message}"):
            book.get("anna")
    (folder / "anna.wav").write_bytes(b"RIFF no audio")
    with pytest.raises(UnavailableError, match="speaker 'anna' cannot be used: anna.wav: .* not a readable audio"):
        book.get("anna")
    monkeypatch.setattr(voices, "MAX_FILE_BYTES", 1000)
    save_audio(folder / "anna.wav", TONE, PROMPT_SAMPLE_RATE)
    with pytest.raises(UnavailableError, match="more than the limit of 1000"):
        book.get("anna")


class Payload:
    """An object whose unpickling creates a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_damaged_spk2info_does_not_hide_the_other_voices(content, folder, tmp_path, book, caplog) -> None:
    (tmp_path / "spk2info.pt").write_bytes(content)
    save_voice(folder / "anna.safetensors", fake_prompt(1))
    assert book.names() == ["anna"]
    assert "spk2info.pt cannot be read" in caplog.text
    assert_same(book.get("anna"), fake_prompt(1))
    with pytest.raises(UnavailableError, match="speaker 'bert' cannot be used: .*spk2info.pt cannot be read"):
        book.get("bert")


def test_code_in_a_spk2info_is_not_run(tmp_path: Path, book: VoiceBook) -> None:
    torch.save({"anna": Payload(tmp_path / "owned")}, tmp_path / "spk2info.pt")
    with pytest.raises(UnavailableError, match="speaker 'anna' cannot be used: .* it has Python objects"):
        book.get("anna")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"speech_token": torch.zeros(1, 30)}, "spk2info.pt, 'anna' has no speech_feat or prompt_speech_feat, no emb"),
        (triton_speaker() | {"speech_feat": None}, "'anna' has no speech_feat or prompt_speech_feat: "),
        ({"embedding": torch.zeros(1, 192), "prompt_text": "It says."}, "'anna': the transcript 'It says.' without"),
        ({"embedding": torch.tensor(0.5)}, r"spk2info.pt, 'anna': prompt shapes .* \(1,\)"),
        (triton_speaker() | {"speech_feat": torch.tensor(0.5)}, "spk2info.pt, 'anna': "),
        (torch.zeros(3), "is a Tensor, not a speaker"),
        (triton_speaker() | {"speech_feat": torch.zeros(1, 200, 80)}, "200 mel frames for 30 speech tokens"),
        (cosyvoice_speaker() | {"prompt_text": torch.tensor([[4, -7]])}, "spk2info.pt, 'anna'.* -7"),
        (triton_speaker() | {"speech_token": torch.full((1, 30), -7)}, "spk2info.pt, 'anna'.* -7"),
    ],
)
def test_a_speaker_of_another_model_is_unavailable_and_the_others_are_not(entry, message, tmp_path, book) -> None:
    torch.save({"anna": entry, "bert": triton_speaker()}, tmp_path / "spk2info.pt")
    with pytest.raises(UnavailableError, match=message):
        book.get("anna")
    assert isinstance(book.get("bert"), Prompt)
