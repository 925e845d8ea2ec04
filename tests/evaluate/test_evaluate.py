"""`cosyvoice-triton evaluate`: the demo voice speaks and is judged, so that a fault in the speech fails."""

import json
import shutil
from pathlib import Path

import pytest
from cosyvoice_triton.audible import leading_silence
from cosyvoice_triton.cli.evaluate import main
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.evaluate import report, speech
from cosyvoice_triton.evaluate.steps import recommended
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.voice.audio import load_recording
from matplotlib.image import imread

from tests.support.evaluation import OF_THE_DEMO_VOICE

SENTENCES = Path("tests/assets/everyday_sentences.jsonl")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "demo"


def test_utterances_are_spoken_whole_and_streamed(demo_models: Path, tmp_path: Path) -> None:
    """Of random weights: as many samples in one chunk as in several."""
    settings = {"flow_precision": "float32", "profile": "unlimited"}
    options = StackOptions(models_dir=demo_models, device="cpu", settings=settings)
    sentence = Sample("a", "It was possible.", load_recording(TRAINED / "voices/rms.wav"), "What p says.")
    found = dict(speech.spoken(options, [sentence], [None], ["offline", "streaming"], 1, tmp_path))
    (whole,), (streamed,) = found["dit-whole"], found["dit"]
    assert whole.wave is not None and streamed.wave is not None and whole.wave.size == streamed.wave.size
    assert len(whole.outcome.arrivals) == 1 < len(streamed.outcome.arrivals)  # type: ignore[union-attr]  # both were answered


def test_onsets_are_drawn_before_and_after_their_silence_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "ONSETS", 2)
    models, output = tmp_path / "models", tmp_path / "out"
    steps.demo(models)
    sentences = [Sample(name, "Hello there.", speaker=name[:3]) for name in ("slt", "rms", "slt2")]
    options = StackOptions(models_dir=models, device="cpu")
    (row,) = speech.spoken(options, sentences, [None], ["streaming"], 1, output)
    *onsets, last = row[1]
    assert last.untrimmed is None and len(onsets) == 2
    for each in onsets:
        assert each.wave is not None and each.untrimmed is not None
        assert (leading_silence(each.untrimmed) or 0) > 0.04 >= (leading_silence(each.wave) or 0)
    assert report.plot_onsets([row, ("upstream", [last])], output) == ["onsets-dit.png"]
    height, width, _ = imread(output / "onsets-dit.png").shape
    assert width > 3 * height, "two rows of two"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stack", ["dit", "unet"])
def test_the_demo_voice_speaks_as_well_as_it_did(stack: str, models: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    steps.demo(models, stack)
    given = [str(models), "--stack", stack, "--data", str(SENTENCES), "--limit", "2", "--output", str(output)]
    assert main([*given, "--device", "cpu", "--require", *OF_THE_DEMO_VOICE]) == 0
    content = json.loads((output / "report.json").read_text())
    assert len(content["answers"][stack]) == len(list((output / stack).glob("*.wav"))) == 2
    assert (output / f"onsets-{stack}.png").is_file() and f"(onsets-{stack}.png)" in (output / "report.md").read_text()
    assert all(content["rows"][0][name] is not None for name in ("rtf", "first_chunk_ms", "leading_silence_ms"))


def test_the_set_of_seed_tts_is_read_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, spoken = tmp_path / "testset/en", tmp_path / "upstream"
    for each in (folder / "prompt-wavs", spoken):
        each.mkdir(parents=True)
    for copy in (folder / "prompt-wavs/p.wav", spoken / "a.wav"):
        shutil.copy(TRAINED / "voices/rms.wav", copy)
    (folder / "meta.lst").write_text("a|What p says.|prompt-wavs/p.wav|It was possible.\n")
    given = ["--set", "seed-tts-en", "--data", str(folder.parent), "--audio", str(spoken), "--output", str(tmp_path)]
    assert main([*given, "--recogniser", "sh -c 'echo It was impossible.' {wav}", "--require", "error_rate<=0.3"]) == 1
    printed = capsys.readouterr()
    assert "| upstream | 0 | 33.3% |" in printed.out
    assert "missed: upstream: error_rate is 0.333, required <= 0.3" in printed.err
    (spoken / "a.wav").unlink()
    assert main(given) == 1
    assert "a.wav" in capsys.readouterr().err
    for wrong in (["models/typo", *given], [str(tmp_path), *given[:2], "--data", str(tmp_path / "typo")]):
        assert main(wrong) == 1
        (line,) = capsys.readouterr().err.splitlines()  # before any judge or model is loaded
        assert "typo" in line


def test_fewer_steps_have_rows_with_the_error_of_their_mel(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps.demo(models)
    given = [str(models), "--data", str(SENTENCES), "--limit", "1", "--device", "cpu", "--output", str(tmp_path)]
    main([*given, "--steps", "4", "2", "4"])
    four, two = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (four["name"], two["name"]) == ("dit-4-steps", "dit-2-steps")
    assert 0.01 < four["mel_error"] < two["mel_error"] < 0.5
    assert "speaks as well as 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "fewest"),
    [
        pytest.param([(0.030, 3.2), (0.034, 3.16), (0.034, 3.1)], 6, id="DNSMOS"),
        pytest.param([(0.030, 3.2), (0.034, 3.16), (0.030, 3.3)], 5, id="all are as good"),
        pytest.param([(0.030, 3.2), (0.036, 3.2), (0.036, 3.2)], 10, id="words"),
        pytest.param([(None, None)] * 3, None, id="nothing was judged"),
    ],
)
def test_the_fewest_steps_that_speak_as_well_are_recommended(
    rows: list[tuple[float | None, float | None]], fewest: int | None
) -> None:
    named = [{"error_rate": wrong, "dnsmos": quality} for wrong, quality in rows]
    assert recommended(named, (10, 6, 5)) == fewest
