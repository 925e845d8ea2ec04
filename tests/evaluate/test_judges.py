"""The judges of speech: words, quality, similarity, and what an answer shows without them."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED, VOICES_DIR
from cosyvoice_triton.evaluate import judges
from cosyvoice_triton.evaluate.report import Requirement, measures, summary
from cosyvoice_triton.evaluate.speech import SpokenSentence
from cosyvoice_triton.load.measure import RequestOutcome
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.networks.hift import load_hift
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.encoders import reference_mel
from cosyvoice_triton.voice.prompt import Recording

from tests.support.checkpoints import UNET_DIR
from tests.support.evaluation import OF_THE_DEMO_VOICE

TONE = np.sin(np.arange(SAMPLE_RATE) * 0.05).astype(np.float32)


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
    path = TRAINED / VOICES_DIR / "rms.wav"
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
    others = {"bands shifted": mel.roll(4, 1), "log10": mel / math.log(10), "too loud": mel + 2}
    others["frames swapped"] = mel[..., : mel.shape[2] // 2 * 2].reshape(1, 80, -1, 2).flip(3).reshape(1, 80, -1)
    assert {name for name, fault in others.items() if missed(fault)} == set(others)


@pytest.mark.slow
def test_voices_are_told_apart_and_silence_has_no_words() -> None:
    rms, slt = (load_audio(TRAINED / VOICES_DIR / f"{name}.wav", PROMPT_SAMPLE_RATE) for name in ("rms", "slt"))
    similarity, (first, second) = judges.Similarity(), np.array_split(rms, 2)
    assert similarity(first, second) > 0.8 > similarity(first, slt)
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
    for voice in ("rms", "slt"):
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
