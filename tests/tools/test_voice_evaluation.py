"""demo_voice/evaluation: word errors, joints, speaker similarity, the report."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.client.requests import Utterance
from cosyvoice_triton.constants import (
    HOP_SAMPLES,
    MEL_RATE,
    OVERLAP_FRAMES,
    OVERLAP_SAMPLES,
    PROMPT_SAMPLE_RATE,
    SAMPLE_RATE,
    TOKEN_RATE,
)
from cosyvoice_triton.demo_checkpoint.checkpoint import TRAINED
from cosyvoice_triton.demo_checkpoint.make import VOICES_DIR
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.hift import load_hift
from cosyvoice_triton.orchestrator.chunking import Hop
from cosyvoice_triton.voice.audio import load_audio, save_audio
from cosyvoice_triton.voice.encoders import SpeakerEncoder, reference_mel
from cosyvoice_triton.voice.prompt import Prompt

from demo_voice.evaluation import __main__ as evaluate_voice
from demo_voice.evaluation import drift, joints, measures, report, segments
from demo_voice.evaluation.alignment import Aligner, errors, estimated, summary
from demo_voice.evaluation.recognition import Recognizer, WordErrors, word_errors, words
from demo_voice.evaluation.takes import Series, Take, copy_synthesis, read_teacher, request_takes
from tests.parity import flow_dit
from tests.parity.fixture import Fixture
from tests.support.checkpoints import DIT_DIR
from tests.support.speech_fixtures import stub_triton
from tests.support.streams import DIT, GOLDEN, ids, prompt
from tests.support.triton_stub import TritonStub


def recording(name: str) -> Take:
    """The recording of a voice in the trained checkpoint."""
    path = TRAINED / VOICES_DIR / f"{name}.wav"
    return Take(path.with_suffix(".txt").read_text(), load_audio(path, PROMPT_SAMPLE_RATE), PROMPT_SAMPLE_RATE)


# --- words -------------------------------------------------------------------------------------------------------


def test_words_are_compared_without_punctuation_and_case() -> None:
    assert words("It's four o'clock, Anna!") == ["its", "four", "oclock", "anna"]


@pytest.mark.parametrize(
    ("text", "recognised", "errors"),
    [
        ("one two three", "one two three", 0),
        ("one two three", "one three", 1),
        ("one two three", "one and two three", 1),
        ("one two three", "one too three", 1),
        ("one two three", "three one two", 2),
        ("one two three", "", 3),
    ],
)
def test_wrong_words_are_counted(text: str, recognised: str, errors: int) -> None:
    assert word_errors(text, recognised) == WordErrors(errors, 3)


@pytest.mark.slow
def test_the_recogniser_works_on_the_teacher_and_does_not_depend_on_earlier_takes() -> None:
    recognizer, takes = Recognizer(), [recording("slt"), recording("rms")]
    first = [recognizer.transcribe(take.waveform, take.rate) for take in takes]
    assert [recognizer.transcribe(take.waveform, take.rate) for take in reversed(takes)] == first[::-1]
    errors = [word_errors(take.text, recognised) for take, recognised in zip(takes, first, strict=True)]
    assert (errors[0] + errors[1]).rate < 0.4, first


def test_no_words_are_recognised_in_silence() -> None:
    assert words(Recognizer().transcribe(np.zeros(SAMPLE_RATE, np.float32), SAMPLE_RATE)) in ([], ["the"], ["a"])


def test_estimated_times_of_words_are_near_those_that_pocketsphinx_aligns() -> None:
    """On the teacher's recordings of the voices, from which no number of the estimate was chosen."""
    aligner, away = Aligner(), []
    for name in ("slt", "rms"):
        text, wave = recording(name).text, load_audio(TRAINED / VOICES_DIR / f"{name}.wav", SAMPLE_RATE)
        estimate, aligned = estimated(text, wave), aligner.align(text, wave)
        assert estimate is not None and aligned is not None
        assert [word for word, _ in estimate] == [word for word, _ in aligned] == words(text)
        away.append(errors(estimate, aligned))
    assert np.median(np.abs(np.concatenate(away))) < 120
    assert summary(away).startswith(f"2 sentences, {len(np.concatenate(away))} words: median")
    assert aligner.align("Xyzzyq.", wave) is None
    assert aligner.align(recording("slt").text, np.zeros(SAMPLE_RATE, np.float32)) is None


# --- joints, voices, parts -----------------------------------------------------------------------------------------


def test_a_click_at_a_joint_is_found_and_a_smooth_joint_is_not_one() -> None:
    wave = np.sin(np.arange(SAMPLE_RATE) * 0.05).astype(np.float32)
    clicked = wave.copy()
    clicked[9000:] += 0.5
    for clicking in (9000, 9000 - OVERLAP_SAMPLES):  # at the beginning and at the end of a cross-fade
        found = measures.joint_steps(Take("", clicked, joints=(4000, clicking)))
        (click,) = (joint for joint in found if joint.usual > 1)
        assert click.usual == pytest.approx(10, rel=0.2) and click.sharpness > 10
        assert [joint.clicks for joint in found] == [joint is click for joint in found]
        assert all(joint.sharpness < 2 for joint in found if joint is not click)
    assert measures.joint_steps(Take("", wave)) == []


def test_a_joint_within_an_equally_steep_pulse_is_no_click() -> None:
    wave = 0.01 * np.sin(np.arange(SAMPLE_RATE) * 0.05).astype(np.float32)
    wave[8990:9010:4] += 0.3
    joint, _ = measures.joint_steps(Take("", wave, joints=(8994,)))
    assert joint.usual > 1 and not joint.clicks


def test_a_bend_without_a_step_is_sharp_and_spectra_differ_where_waveforms_do() -> None:
    wave = np.sin(np.arange(SAMPLE_RATE) * 0.05).astype(np.float32)
    bent = np.concatenate([wave[:9000], wave[8999 - np.arange(SAMPLE_RATE - 9000) % 9000]])  # turns back at 9000
    assert measures.sharpness(bent, 9000) > 10 > 2 > measures.sharpness(wave, 9000)
    assert measures.spectral_distance(bent, wave, 8000) == 0.0
    noise = np.random.default_rng(0).standard_normal(1000)
    assert measures.spectral_distance(1.12202 * noise, noise, 500) == pytest.approx(1.0, abs=0.01)


def test_served_chunks_join_as_one_piece_and_upstreams_do_not() -> None:
    hift = load_hift(TRAINED / DIT_DIR / "hift.pt")
    mel = torch.from_numpy(reference_mel(recording("slt").waveform)).T[:, 40:110]
    spoken = joints.Vocoders(hift).speak(stacks.DIT, mel.split([30, 40], dim=1))
    assert spoken.joints == [(30 - OVERLAP_FRAMES) * HOP_SAMPLES]
    lines = joints.table([spoken]).splitlines()
    assert lines[0].startswith("1 voiced joints of the dit stack")
    rows = {
        cells[1].strip(): [float(cell) for cell in cells[2:-1]] for cells in (line.split("|") for line in lines[4:])
    }
    assert rows[joints.SERVED][:2] == pytest.approx(rows[joints.WHOLE][:2], rel=0.1)
    (_, _, *served), (_, _, *before) = rows[joints.SERVED], rows[joints.BEFORE]
    assert max(served[0], served[2]) < 0.1 and min(before[0], before[2]) > 1


def test_a_recording_is_nearest_to_its_own_voice() -> None:
    whole = {name: recording(name) for name in ("slt", "rms")}
    halves = {
        name: [Take("", part, take.rate) for part in np.array_split(take.waveform, 2)] for name, take in whole.items()
    }
    encoder = SpeakerEncoder(TRAINED / DIT_DIR)
    voices = {name: parts[:1] for name, parts in halves.items()}
    assert measures.nearest(encoder, [halves["slt"][1], halves["rms"][1]], voices) == ["slt", "rms"]


def test_copy_synthesis_is_as_long_as_the_teacher() -> None:
    teacher = Series("teacher", "", "slt", [recording("slt")])
    (take,) = copy_synthesis(TRAINED / DIT_DIR, teacher, "dit").takes
    assert take.seconds == pytest.approx(teacher.takes[0].seconds, abs=0.05)
    assert 0.01 < np.abs(take.waveform).max() <= 1


def test_recordings_of_the_teacher_are_found_by_sentence_number(tmp_path: Path) -> None:
    (tmp_path / "slt").mkdir()
    for number in range(2):
        save_audio(tmp_path / "slt" / f"{number:02d}.wav", np.full(1600 * (number + 1), 0.1), PROMPT_SAMPLE_RATE)
    series = read_teacher(tmp_path, "slt", ["One.", "Two."])
    assert [take.seconds for take in series.takes] == pytest.approx([0.1, 0.2])
    with pytest.raises((OSError, RuntimeError), match=r"02\.wav"):
        read_teacher(tmp_path, "slt", ["One.", "Two.", "Three."])


def test_streamed_takes_have_joints_and_times() -> None:
    with stub_triton(TritonStub(chunks=3, pause=0.05)) as address:
        (take,) = request_takes(address, "cosyvoice2_dit", "streaming", [Utterance("Hello.")])
        (whole,) = request_takes(address, "cosyvoice2_dit", "offline", [Utterance("Hello.")])
    size = SAMPLE_RATE // 5
    assert take.joints == (size, 2 * size) and len(take.waveform) == 3 * size and whole.joints == ()
    assert take.first_chunk is not None and take.total is not None and take.first_chunk < take.total


# --- the report ----------------------------------------------------------------------------------------------------


def rows(teacher: Series | None) -> list[dict]:
    wave = np.sin(np.arange(SAMPLE_RATE) * 0.05).astype(np.float32)
    take = Take("One two three four five.", wave, SAMPLE_RATE, (12000,), first_chunk=0.3, total=0.6)
    transcripts = {report.STREAMED: "one two three four", report.OFFLINE: "one two three four five"}
    return [
        measures.figures(Series(system, "dit", "slt", [take]), [words], teacher)
        for system, words in transcripts.items()
    ]


def test_the_report_shows_which_targets_were_reached() -> None:
    teacher = Series("teacher", "", "slt", [Take("", np.zeros(SAMPLE_RATE, np.float32))])
    text = report.markdown(rows(teacher), {"dit": (30, 40)}, "one sentence")
    assert "| text to audio, streamed | dit | slt | 20.0% | 1.00 (1.00–1.00) | 0 of 2, largest" in text
    assert "| 0.60 | 300 ms, p95 300 ms |" in text
    for line in (
        "| WER, streamed, at most 20% | 20.0% (the worst stack and voice) | reached |",
        "| streamed within 3 points of offline | +20.0 | **missed** |",
        "| nearest to the voice of its reference, dit | 30 of 40 | **missed** |",
        "| RTF, dit, at most 0.5 | 0.60 | **missed** |",
    ):
        assert line in text


def test_without_a_teacher_its_figures_are_marked_as_not_given() -> None:
    assert "| lengths 0.6–1.6× the teacher's | not given |  |" in report.markdown(rows(None), {}, "one sentence")


def test_a_missing_recording_of_the_teacher_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--models", str(TRAINED), "--teacher", str(tmp_path), "--output", str(tmp_path / "out")]
    assert evaluate_voice.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("voice_evaluation: ") and "00.wav" in line


# --- segments ----------------------------------------------------------------------------------------------------


def test_pauses_and_levels_are_measured_inside_a_segment_and_between_two() -> None:
    def sound(milliseconds: int, level: float) -> np.ndarray:
        count = milliseconds * SAMPLE_RATE // 1000
        return (level * np.sin(np.arange(count) / 5)).astype(np.float32)

    first = np.concatenate([sound(50, 0), sound(300, 0.2), sound(40, 0), sound(300, 0.2), sound(120, 0)])
    second = np.concatenate([sound(80, 0), sound(500, 0.1), sound(60, 0)])
    together = np.concatenate([sound(70, 0), sound(400, 0.2), sound(350, 0), sound(400, 0.05), sound(90, 0)])
    *pauses, inside, between = segments.compared(together, first, second).values()
    assert pauses == [350, 120 + 80, 120, 80]
    assert (inside, between) == pytest.approx((12.04, 6.02), abs=0.1)


def test_the_tokens_of_silent_and_other_frames_are_counted_apart() -> None:
    wave = np.concatenate([np.zeros(SAMPLE_RATE), np.sin(np.arange(SAMPLE_RATE) / 5)]).astype(np.float32)
    silent, sounding = segments.tokens_by_sound(lambda waves: [np.repeat([7, 8, 9], [25, 20, 5])], [wave, wave])
    assert silent == {7: 50} and sounding == {8: 40, 9: 10}


# --- drift -------------------------------------------------------------------------------------------------------


def test_drift_is_measured_against_unlimited_memory_and_the_recording() -> None:
    """Louder audio of the same pitch, of which the tokenizer finds four of five tokens again."""
    seconds, rate = drift.SECONDS, SAMPLE_RATE
    wave = np.sin(2 * np.pi * 200 * np.arange(seconds * rate) / rate).astype(np.float32) / 4
    mel = np.zeros((80, seconds * MEL_RATE), np.float32)
    tokens, voice = np.arange(seconds * TOKEN_RATE), np.zeros(192, np.float32)
    voice[0] = 3
    speech = drift.Speech(Prompt(tokens[:5], mel[:, :10].T, voice, text=""), tokens)
    parts = seconds // drift.STRETCH

    def encode(_: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full((parts, 192), 192**-0.5), np.stack(drift.stretches(tokens * (tokens % 5 > 0), TOKEN_RATE))

    unlimited = drift.Rendered(speech, mel, wave)
    found = drift.Rendered(speech, mel + 0.5, 2 * wave).compared(unlimited, encode)
    for name, value in {"mel": 4.343, "x_vector": 192**-0.5, "loudness": 6.021, "pitch": 0.0, "tokens": 0.8}.items():
        assert found[name] == pytest.approx([value] * parts, abs=0.01), name
    row = drift.Drift("dit", "100 frames", mib=62.5, keys=400, **found)
    cells = drift.table([row]).splitlines()[-1].strip("| ").split(" | ")
    assert cells[:-2] == ["100 frames", "62.5", "400", *["4.34"] * 6, "0.072 → 0.072", "+6.02 dB"]


def test_upstreams_memory_keeps_the_newest_frames_and_the_prompts_last_ones() -> None:
    prompt, first, second, third = np.split(np.arange(310), [120, 180, 250])
    memory = torch.zeros(1, 0, 1)
    kept = []
    for new in (prompt, first, second, third):
        frames = torch.cat([memory, torch.from_numpy(new)[None, :, None]], dim=1)
        memory = drift.by_upstreams_rule(KeyValues(frames, -frames), len(new), 120).keys
        kept.append(memory[0, :, 0].tolist())
    assert kept[1] == [*first, *prompt]
    assert kept[2] == [*second, *first[:50], *prompt[-100:]]
    assert kept[3] == [*third, *second[:60], *prompt[-100:]]


def test_upstreams_memory_of_a_short_stream_is_unlimited() -> None:
    """Of a prompt of 24 frames it keeps 124 in all."""
    network = flow_dit.build(Fixture(GOLDEN / f"{DIT}.json"), "stepaudio2_flow_tiny.weights.safetensors")
    hops = [Hop(0, 20, False), Hop(20, 20, False), Hop(40, 20, False), Hop(60, 10, True)]
    expected, found = (render(network, prompt(1), ids(1, 70), hops) for render in (drift.by_dit, drift.by_upstream_dit))
    torch.testing.assert_close(found[:, :120], expected[:, :120], atol=1e-4, rtol=0)
    assert (found[:, 120:] - expected[:, 120:]).abs().max() > 1e-3
