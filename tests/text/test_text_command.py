"""`cosyvoice-triton text`: what it prints for people and as JSON lines."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cosyvoice_triton.cli import text as command
from cosyvoice_triton.text import frontend
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.text.kana import MISSING


def test_segments_and_pauses_are_printed_with_their_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["It costs $5. [pause 2s] Really."]) == 0
    first, pause, last = capsys.readouterr().out.splitlines()
    assert first.endswith(" s  It costs five dollars.") and float(first.split()[0]) > 1
    assert pause == "  2.0 s  (pause)" and last.endswith(" s  Really.")


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["25", "--language", "zh"], "二十五。"),
        (["Es kostet 5 Euro.", "--stack", "cosyvoice3", "--language", "German"], "Es kostet 5 Euro."),
    ],
)
def test_the_named_language_and_stack_read_the_text(
    arguments: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.endswith(f" s  {printed}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Hi.", "--language", "tlh"], "error: language 'tlh' is not one of auto, zh, en, ja, ko\n"),
        (["Hallo.", "--language", "de"], "error: language 'de' is not one of auto, zh, en, ja, ko\n"),
        (["?!"], "error: target_text has nothing to speak: '?!'\n"),
    ],
)
def test_an_error_is_one_line_that_names_the_value(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 1
    assert capsys.readouterr().err == message


def test_a_file_of_pronunciations_is_used_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tmp_path / "words.txt"
    words.write_text("nginx = engine x")
    assert command.main(["We run nginx.", "--pronunciation", str(words)]) == 0
    assert capsys.readouterr().out.endswith("We run engine x.\n")
    words.write_text("nginx")
    with pytest.raises(SystemExit):
        command.main(["We run nginx.", "--pronunciation", str(words)])
    assert "words.txt, line 1" in capsys.readouterr().err


def answers(
    lines: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[Any]:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(json.dumps(line) for line in lines)))
    assert command.main(["--jsonl", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_json_line_has_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"text": "It costs $5. [pause]"},
        {"text": "25", "language": "zh"},
        {"text": "5 Euro.", "stack": "cosyvoice3", "language": "de"},
        {"text": "25", "stack": "cosyvoice2"},
        {"text": "?!"},
        {"text": "Hi.", "language": "tlh"},
        {"text": "Hi.", "stack": "tacotron"},
        {},
        [],
    ]
    first, named, german, by_model, *errors = answers(lines, monkeypatch, capsys, "--language", "en")
    assert first["segments"] == ["It costs five dollars.", ""] and first["seconds"][1] == 0.5 < first["seconds"][0]
    assert first.keys() == {"segments", "seconds", "language"} and first["language"] == "en"
    assert (named["segments"], named["language"]) == (["二十五。"], "zh")
    assert (german["segments"], german["language"]) == (["5 Euro."], "de")
    assert by_model["segments"] == ["twenty five."]
    assert [error.keys() for error in errors] == [{"error"}] * 5
    for error, words in zip(errors, ("nothing to speak", "'tlh'", "'tacotron'", "no text", "list"), strict=True):
        assert words in error["error"]


def test_what_is_not_spoken_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (answer,) = answers([{"text": "<p>Hi <|s_1|>there</p> :)"}], monkeypatch, capsys)
    reasons = {each["text"]: each["reason"] for each in answer["left_out"]}
    assert reasons == {"<|s_1|>": "control token", "<p>": "HTML tag", "</p>": "HTML tag", ":)": "smiley"}
    assert command.main(["Hi :)"]) == 0
    assert capsys.readouterr().err == "left out: ':)' (smiley)\n"


def test_json_lines_are_all_that_is_on_standard_output(tmp_path: Path) -> None:
    """Also if a library prints, in Python or below it."""
    noisy = "import os; from cosyvoice_triton.cli import text; own = text.TextFrontend.preview\n"
    noisy += "text.TextFrontend.preview = lambda *a, **b: (print('noise'), os.write(1, b'more'), own(*a, **b))[2]\n"
    run = subprocess.run(
        [sys.executable, "-c", noisy + "text.main(['--jsonl'])"],
        input='{"text": "Hi."}\n',
        capture_output=True,
        text=True,
    )
    (line,) = run.stdout.splitlines()
    assert json.loads(line)["segments"] == ["Hi."] and "noise" in run.stderr and "more" in run.stderr


def test_kanji_without_the_package_that_reads_them_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frontend, "kana_available", lambda: False)
    monkeypatch.setattr(command, "_frontend", TextFrontend)
    kanji, kana = {"text": "今日は雨です。明日も雨です。"}, {"text": "きょうは あめ です。"}
    warned, unharmed = answers([kanji, kana], monkeypatch, capsys, "--stack", "cosyvoice3")
    assert warned["warnings"] == [MISSING] and "warnings" not in unharmed
    assert unharmed["segments"] == [kana["text"]]
    (other,) = answers([kanji], monkeypatch, capsys, "--stack", "unet")
    assert "warnings" not in other and other["segments"] == [kanji["text"]]
    assert command.main([str(kanji["text"]), "--stack", "cosyvoice3"]) == 0
    assert capsys.readouterr().err == f"warning: {MISSING}\n"
