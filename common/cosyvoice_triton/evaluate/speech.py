"""The speech to judge: the answers of a stack in this process, or a folder of files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.doors import SpeakerDoor
from cosyvoice_triton.load.measure import RequestOutcome
from cosyvoice_triton.load.plan import MIN_WARMUP, Load, LoadJob
from cosyvoice_triton.load.runner import measured
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.speaker.speaker import Speaker
from cosyvoice_triton.voice.audio import load_audio

OWN = "own"
HERE = "this process"
ONSETS = 10  # answers of a row that are spoken once more, with their silence
# The lists of seed-tts-eval's folder `seedtts_testset`, whose recordings lie beside them in prompt-wavs/.
SETS = {"seed-tts-en": Path("en/meta.lst"), "seed-tts-zh": Path("zh/meta.lst"), OWN: Path()}


@dataclass(frozen=True)
class SpokenSentence:
    """One sentence spoken once.

    wave: float32 (N,) at 24 kHz; None if it failed. outcome: times and chunks, unless it was read from a folder.
    untrimmed: the same speech with the silence at its ends, of the first ONSETS answers of a stack.
    """

    sample: Sample
    path: Path
    wave: np.ndarray | None = field(repr=False)
    outcome: RequestOutcome | None = None
    untrimmed: np.ndarray | None = field(default=None, repr=False)


def spoken(
    options: StackOptions,
    samples: Sequence[Sample],
    modes: Sequence[Literal["streaming", "offline"]],
    tasks: int,
    output: Path,
    steps: int | None = None,
) -> Iterator[tuple[str, list[SpokenSentence]]]:
    """Yield a name and the answers, for each mode, "offline" or "streaming".

    tasks: requests at once. output: a folder for the audio. steps: of the Euler solve, which the name then says; None:
    the checkpoint's. ClientError or ValueError.
    """
    label = options.stack
    if steps is not None:
        options = replace(options, settings={**options.settings, "n_timesteps": str(steps)})
        label += f"-{steps}-steps"
    with Speaker.of(options) as speaker:
        for mode in modes:
            name = label + ("-whole" if mode == "offline" else "")
            jobs = [LoadJob(each.id, each.utterance({"seed": seed})) for seed, each in enumerate(samples)]
            load = Load(servers=[HERE], model=options.orchestrator, mode=mode, jobs=jobs, tasks=tasks)
            answers = _answers(replace(load, warmup=jobs[:MIN_WARMUP]), speaker, samples, output / name)
            untrimmed = {job.id: {**job.base.parameters, "trim_silence": False} for job in jobs[:ONSETS]}
            whole = [LoadJob(job.id, replace(job.base, parameters=untrimmed[job.id])) for job in jobs[:ONSETS]]
            others = _answers(replace(load, jobs=whole), speaker, samples[:ONSETS], output / f"{name}-untrimmed")
            onsets = [replace(one, untrimmed=other.wave) for one, other in zip(answers, others, strict=False)]
            yield name, [*onsets, *answers[ONSETS:]]


def _answers(load: Load, speaker: Speaker, samples: Sequence[Sample], folder: Path) -> list[SpokenSentence]:
    """Return the answer for each sample; their audio is kept in the folder."""
    run = measured(replace(load, audio_dir=folder), folder.name, {HERE: SpeakerDoor(speaker, load.mode)})
    if run.interrupted:
        raise KeyboardInterrupt
    outcomes = {outcome.id: outcome for outcome in run.outcomes}
    return [_answer(each, folder, outcomes.get(each.id)) for each in samples]


def _answer(sample: Sample, folder: Path, outcome: RequestOutcome | None) -> SpokenSentence:
    path = folder / f"{sample.id}.wav"
    good = outcome is not None and not outcome.error
    return SpokenSentence(sample, path, load_audio(path, SAMPLE_RATE) if good else None, outcome)


def from_folder(folder: Path, samples: Sequence[Sample]) -> tuple[str, list[SpokenSentence]]:
    """Return the folder's name and an answer for each sample, from ID.wav; OSError if one cannot be read."""
    paths = [folder / f"{sample.id}.wav" for sample in samples]
    try:
        waves = [load_audio(path, SAMPLE_RATE) for path in paths]
    except RuntimeError as error:  # soundfile's own
        raise OSError(f"{error}; {folder} needs a file ID.wav for each sentence") from None
    return folder.name, [SpokenSentence(*each) for each in zip(samples, paths, waves, strict=True)]
