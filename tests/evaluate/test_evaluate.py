"""`cosyvoice-triton evaluate`: the demo voice speaks and is judged, so that a fault in the speech fails.
And the judges themselves."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.audible import leading_silence
from cosyvoice_triton.cli.evaluate import main
from cosyvoice_triton.constants import HOP_SAMPLES, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED, VOICES_DIR
from cosyvoice_triton.evaluate import judges, report, speech
from cosyvoice_triton.evaluate.report import Requirement, measures, recommended, summary
from cosyvoice_triton.evaluate.speech import SpokenSentence
from cosyvoice_triton.load.measure import RequestOutcome
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.networks.hift import load_hift
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.voice.audio import load_audio, load_recording
from cosyvoice_triton.voice.encoders import reference_mel
from cosyvoice_triton.voice.prompt import Recording
from matplotlib.image import imread

from tests.support.checkpoints import UNET_DIR

# What CI requires of a few sentences, with a margin: the whole set's figures are in docs/results/quality.md.
OF_THE_DEMO_VOICE = ("failed<=0", "silent<=0", "clipped<=0", "error_rate<=0.2", "dnsmos>=2.7", "similarity>=0.85")
SENTENCES = Path("tests/assets/everyday_sentences.jsonl")
TONE = np.sin(np.arange(SAMPLE_RATE) * 0.05).astype(np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "demo"


def test_utterances_are_spoken_whole_and_streamed(demo_models: Path, tmp_path: Path) -> None:
    """Of random weights: as many samples in one chunk as in several."""
    settings = {"flow_precision": "float32", "profile": "unlimited"}
    options = StackOptions(models_dir=demo_models, device="cpu", settings=settings)
    sentence = Sample("a", "It was possible.", load_recording(TRAINED / "voices/kumo.wav"), "What p says.")
    found = dict(speech.spoken(options, [sentence], ["offline", "streaming"], 1, tmp_path))
    (whole,), (streamed,) = found["dit-whole"], found["dit"]
    assert whole.wave is not None and streamed.wave is not None and whole.wave.size == streamed.wave.size
    assert len(whole.outcome.arrivals) == 1 < len(streamed.outcome.arrivals)  # type: ignore[union-attr]  # both were answered


def test_onsets_are_drawn_before_and_after_their_silence_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "ONSETS", 2)
    models, output = tmp_path / "models", tmp_path / "out"
    steps.demo(models)
    sentences = [Sample(voice, "Hello there.", speaker=voice) for voice in ("nezumi", "kumo", "alpha")]
    options = StackOptions(models_dir=models, device="cpu")
    (row,) = speech.spoken(options, sentences, ["streaming"], 1, output)
    *onsets, last = row[1]
    assert last.untrimmed is None and len(onsets) == 2
    for each in onsets:
        assert each.wave is not None and each.untrimmed is not None
        assert each.untrimmed.size >= each.wave.size and (leading_silence(each.wave) or 0) <= 0.04
    assert report.plot_onsets([row, ("upstream", [last])], output) == ["onsets-dit.png"]
    height, width, _ = imread(output / "onsets-dit.png").shape
    assert width > 3 * height, "two rows of two"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stack", stacks.names())
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
        shutil.copy(TRAINED / "voices/kumo.wav", copy)
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


@pytest.mark.parametrize(
    ("text", "recognised", "wrong", "units"),
    [
        ("It's 4 o'clock, Anna!", "its four oclock anna", 0, 4),
        ("one two three", "one and too", 2, 3),
        ("one two three", "", 3, 3),
        ("今天7点。OK", "今天七点 OK", 0, 5),
        ("今天七点", "今天起点", 1, 4),
        ("七", "7", 0, 1),
    ],
)
def test_wrong_words_and_characters_are_counted(text: str, recognised: str, wrong: int, units: int) -> None:
    assert judges.errors(text, recognised) == (wrong, units)


@pytest.mark.slow
def test_faults_of_the_mel_or_the_vocoder_are_noticed() -> None:
    path = TRAINED / VOICES_DIR / "kumo.wav"
    original, text = load_audio(path, PROMPT_SAMPLE_RATE), path.with_suffix(".txt").read_text()
    mel = torch.from_numpy(reference_mel(Recording(original)).T.copy())[None]  # (1, 80, T)
    hift = load_hift(TRAINED / UNET_DIR / "hift.pt")
    moonshine, dnsmos, similarity = judges.Moonshine(), judges.Dnsmos(), judges.Similarity()

    def missed(mel: torch.Tensor) -> bool:
        noise = torch.zeros(1, mel.shape[2] * HOP_SAMPLES, hift.config.harmonics + 1)
        with torch.inference_mode():
            wave = judges.at_16k(hift(mel, noise)[0].reshape(-1).clone().numpy())
        wrong, words = judges.errors(text, moonshine([path], [wave])[0])
        row = {"error_rate": wrong / words, "dnsmos": dnsmos(wave), "similarity": similarity(wave, original)}
        row |= {"name": "", "failed": 0, "silent": 0.0, "clipped": 0.0}
        return any(Requirement.read(each).missed_by(row) for each in OF_THE_DEMO_VOICE)

    assert not missed(mel)
    others = {"bands shifted": mel.roll(2, 1), "log10": mel / math.log(10), "too loud": mel + 2}
    others["frames swapped"] = mel[..., : mel.shape[2] // 2 * 2].reshape(1, 80, -1, 2).flip(3).reshape(1, 80, -1)
    assert {name for name, fault in others.items() if missed(fault)} == set(others)


@pytest.mark.slow
def test_voices_are_told_apart_and_silence_has_no_words() -> None:
    kumo, nezumi = (load_audio(TRAINED / VOICES_DIR / f"{name}.wav", PROMPT_SAMPLE_RATE) for name in ("kumo", "nezumi"))
    similarity, (first, second) = judges.Similarity(), np.array_split(kumo, 2)
    assert similarity(first, second) > 0.8 > similarity(first, nezumi)
    assert judges.Moonshine()([], [np.zeros(PROMPT_SAMPLE_RATE, np.float32)]) == [""]


def test_a_speaker_vector_is_that_of_the_package_s_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which needs libraries that are not installed: of them it calls one function."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    def melspectrogram(y: np.ndarray, sr: int, n_fft: int, hop_length: int, n_mels: int) -> np.ndarray:
        filters = mel_filter_bank(n_fft // 2 + 1, n_mels, 0, sr / 2, sr, norm="slaney", mel_scale="slaney")
        how = {"power": 2.0, "center": True, "pad_mode": "constant", "mel_filters": filters}
        return spectrogram(y, window_function(n_fft, "hann"), n_fft, hop_length, **how)

    librosa = SimpleNamespace(feature=SimpleNamespace(melspectrogram=melspectrogram))
    morphology = SimpleNamespace(binary_dilation=None)
    for name, module in {"librosa": librosa, "webrtcvad": object(), "scipy.ndimage.morphology": morphology}.items():
        monkeypatch.setitem(sys.modules, name, module)
    from resemblyzer import VoiceEncoder

    theirs, ours = VoiceEncoder("cpu", verbose=False), judges.Similarity()
    for voice in ("kumo", "nezumi"):
        wave = load_audio(TRAINED / VOICES_DIR / f"{voice}.wav", PROMPT_SAMPLE_RATE)
        np.testing.assert_allclose(ours.vector(wave), theirs.embed_utterance(wave), atol=1e-4)


def test_a_missing_judge_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "find_spec", lambda name: None)
    with pytest.raises(
        judges.MissingJudgeError, match=r"speechmos is not installed: pip install 'cosyvoice-triton\[evaluate\]'"
    ):
        judges.Dnsmos()


def test_a_recogniser_of_ones_own_reads_all_files_in_one_call() -> None:
    echo = f"{sys.executable} -c \"import sys; print(*sys.argv[1:], sep='\\n')\" "
    assert judges.CommandRecogniser(echo + "{wav}")([Path("a b"), Path("c")], []) == ["a b", "c"]
    with pytest.raises(ValueError, match="gave 2 texts for 1 files"):
        judges.CommandRecogniser(echo + "{wav} more")([Path("a")], [])
    with pytest.raises(ValueError, match=r"has no \{wav\}"):
        judges.CommandRecogniser("asr")


def test_figures_of_answers_are_summed_up_and_required() -> None:
    def answer(wave: np.ndarray | None) -> SpokenSentence:
        outcome = RequestOutcome("a", "", 0.0, (0.2,), (SAMPLE_RATE,), 0.5)
        return SpokenSentence(Sample("a", "Hello."), Path("a.wav"), wave, outcome)

    late = np.concatenate([np.zeros(SAMPLE_RATE // 2, np.float32), 0.5 * TONE])
    waves = [late, np.zeros(SAMPLE_RATE, np.float32), (2 * TONE).clip(-0.99, 0.99), None]
    row = summary("dit", [measures(answer(wave)) for wave in waves])
    assert (row["answers"], row["failed"], row["rtf"], row["first_chunk_ms"]) == (4, 1, 0.5, 200)
    assert (row["silent"], row["clipped"]) == pytest.approx((1 / 3, 1 / 3)) and row["dnsmos"] is None
    assert 200 < row["leading_silence_ms"] < 260  # the median of 490 and 0
    assert not Requirement.read("rtf<=0.5").missed_by(row)
    assert Requirement.read("rtf>=0.6").missed_by(row) == "dit: rtf is 0.5, required >= 0.6"
    assert "dnsmos was not measured" in Requirement.read("dnsmos>=1").missed_by(row)
