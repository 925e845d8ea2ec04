"""`cosyvoice-triton voice`: the voices that it writes, lists and deletes, and its error messages."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
from cosyvoice_triton import samples
from cosyvoice_triton.cli import voice as command
from cosyvoice_triton.constants import MEL_RATE, PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.prompt import Prompt

from tests.conftest import ROOT

VOICE = samples.FOLDER / "reference_en.wav"


def arguments(models: Path, name: str = "anna", audio: Path = VOICE, *more: str) -> list[str]:
    return ["add", str(models), name, "--reference-audio", str(audio), *more]


@pytest.mark.parametrize("stack", ["dit", "unet"])
def test_a_voice_is_encoded_with_its_text_and_found_by_its_name(stack, demo_models, capsys) -> None:
    text = ["--reference-text", " What she<|s_1|>\n says. ", "--stack", stack]
    assert command.main(arguments(demo_models, f"saved {stack}", VOICE, *text)) == 0
    voice = VoiceBook(demo_models / "voices", demo_models, str).get(f"saved {stack}")
    assert isinstance(voice, Prompt)
    assert voice.text == "What she says."
    assert len(voice.tokens) == len(voice.mel) // 2 > 100
    out, err = capsys.readouterr()
    assert "[1/2]" in out and "5.4 s" in out and f"speaker 'saved {stack}'" in out
    assert "the recording speaks for 5.1 s, but its transcript takes about" in err


def test_silence_is_cut_from_a_recording_only_if_that_is_asked_for(demo_models, tmp_path, capsys) -> None:
    wav = np.pad(load_audio(VOICE, PROMPT_SAMPLE_RATE), 2 * PROMPT_SAMPLE_RATE)
    for option, seconds in (["--trim"], 5.5), ([], 9.4):
        assert (
            command.main(arguments(demo_models, "padded", recorded(tmp_path / "a.wav", wav), "--replace", *option)) == 0
        )
        voice = VoiceBook(demo_models / "voices", demo_models, str).get("padded")
        assert "s of silence at its beginning, which answers may repeat: trim it" in capsys.readouterr().err
        assert len(voice.mel) == pytest.approx(MEL_RATE * seconds, abs=6)


def test_voices_are_exported_as_upstream_saves_them(demo_models: Path, tmp_path: Path) -> None:
    """The keys, shapes and types of `add_zero_shot_spk`; what upstream gives the LLM is the text's ids, as they are."""
    file, words = tmp_path / "spk2info.pt", ["--reference-text", "What she says."]
    for name, more in (("plain", []), ("soft", ["--instruct-text", "Softly."])):
        assert command.main(arguments(demo_models, name, VOICE, *words, *more)) == 0
        export = ["export", str(demo_models), name, "--format", "spk2info", "--output", str(file)]
        assert command.main(export) == 0
    speakers = torch.load(file, weights_only=True)
    assert list(speakers) == ["plain", "soft"]
    tokenizer = LLMTokenizer.from_dir(demo_models / "cosyvoice2_llm")
    assert tokenizer.decode(speakers["soft"]["prompt_text"][0].tolist()) == "Softly.<|endofprompt|>What she says."
    count = speakers["plain"]["llm_prompt_speech_token"].shape[1]
    kinds = {key: (tuple(value.shape), value.dtype) for key, value in speakers["plain"].items()}
    ids, tokens, one = tokenizer.text_ids("What she says."), ((1, count), torch.int32), ((1,), torch.int32)
    assert kinds == {
        **{"prompt_text": ((1, len(ids)), torch.int32), "prompt_text_len": one},
        **{"llm_prompt_speech_token": tokens, "llm_prompt_speech_token_len": one},
        **{"flow_prompt_speech_token": tokens, "flow_prompt_speech_token_len": one},
        **{"prompt_speech_feat": ((1, 2 * count, 80), torch.float32), "prompt_speech_feat_len": one},
        **{"llm_embedding": ((1, 192), torch.float32), "flow_embedding": ((1, 192), torch.float32)},
    }
    again = VoiceBook(tmp_path, tmp_path, tokenizer.decode).get("soft")
    assert (again.instruction, again.text) == ("Softly.", "What she says.")


def test_a_voice_is_added_with_its_dictionary_and_deleted_with_it(demo_models, tmp_path, capsys) -> None:
    words = tmp_path / "words.txt"
    words.write_text("nginx = engine x")
    options = ["--pronunciation", str(words), "--consent", "She agreed.", "--loudness", "-20.5"]
    assert command.main(arguments(demo_models, "speller", VOICE, *options)) == 0
    capsys.readouterr()
    assert command.main(["list", str(demo_models), "--jsonl"]) == 0
    (listed,) = [line for line in map(json.loads, capsys.readouterr().out.splitlines()) if line["name"] == "speller"]
    assert listed["consent"] == "She agreed." and listed["created_at"] > 1.7e9
    assert VoiceBook(demo_models / "voices", demo_models, str).pronunciation("speller") == {"nginx": "engine x"}
    exported = tmp_path / "speller.zip"
    assert command.main(["export", str(demo_models), "speller", "--output", str(exported)]) == 0
    assert command.main(["import", str(demo_models), str(exported)]) == 1  # the name is taken
    assert command.main(["delete", str(demo_models), "speller"]) == 0
    assert command.main(["import", str(tmp_path), str(exported), "--name", "copy"]) == 0
    copy = VoiceBook(tmp_path / "voices", tmp_path, str)
    assert isinstance(copy.get("copy"), Prompt) and copy.pronunciation("copy") == {"nginx": "engine x"}
    assert copy.rights("copy").consent == "She agreed." and copy.get("copy").loudness == -20.5
    assert not list((demo_models / "voices").glob("speller*"))
    words.write_text("nginx")
    with pytest.raises(SystemExit):
        command.main(arguments(demo_models, "speller", VOICE, "--pronunciation", str(words)))
    assert "words.txt, line 1: 'nginx' is not `word = reading`" in capsys.readouterr().err


def test_a_voice_is_only_replaced_with_the_option(demo_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments(demo_models, "twice")) == 0
    assert command.main(arguments(demo_models, "twice")) == 1
    assert "twice.safetensors exists; choose another name, or give --replace" in capsys.readouterr().err
    assert command.main(arguments(demo_models, "twice", VOICE, "--replace")) == 0


def recorded(path: Path, wav: np.ndarray) -> Path:
    sf.write(path, wav, PROMPT_SAMPLE_RATE)
    return path


@pytest.mark.parametrize(
    ("name", "audio", "more", "message"),
    [
        ("../anna", VOICE, (), "'../anna' cannot be a voice's name"),
        ("anna", Path("absent.wav"), (), "No such file or directory: 'absent.wav'"),
        ("anna", ROOT / "pyproject.toml", (), "use one of WAV, FLAC, MP3, OGG, M4A"),
        ("anna", VOICE, (), "speech_tokenizer_v[23]*.onnx"),
        ("anna", VOICE, ("--reference-text", "<|s_1|>"), "reference_text has nothing to speak"),
        ("anna", 500, (), "lasts 0.03125 s at 16000 Hz"),  # samples of silence
        ("anna", PROMPT_SAMPLE_RATE, (), "the recording is silent"),
    ],
)
def test_every_error_is_reported_in_one_line(name, audio, more, message, tmp_path, capsys) -> None:
    if isinstance(audio, int):
        audio = recorded(tmp_path / "silence.wav", np.zeros(audio, np.float32))
    assert command.main(arguments(tmp_path, name, audio, *more)) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "voices").exists()


def test_voices_are_listed_and_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "voices").mkdir()
    for name in ("anna.wav", "anna.txt", "ben.wav"):
        (tmp_path / "voices" / name).touch()
    assert command.main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == ["anna", "ben"]
    assert command.main(["list", str(tmp_path / "absent")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert command.main(["delete", str(tmp_path), "anna"]) == 0
    assert [path.name for path in (tmp_path / "voices").iterdir()] == ["ben.wav"]
    for name in ("anna", "../voices/ben"):
        assert command.main(["delete", str(tmp_path), name]) == 1
        assert f"no voice {name!r}" in capsys.readouterr().err
