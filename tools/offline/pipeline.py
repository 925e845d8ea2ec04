"""From samples to audio files, batch by batch: voices and texts, LLM, vocoder, files.

Stages take turns, so that each one's time is its own. What fails fails for its sample alone, and is kept by name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from common.constants import SAMPLE_RATE
from common.errors import UnavailableError
from common.llm.interface import LLMPrompt, Sampling
from common.text import TextFrontend, clean_text
from common.voice.prompt import Prompt
from tools.load.samples import Sample
from tools.offline.batch_lm import BatchLM, GeneratedTokens
from tools.offline.inputs import Voices
from tools.offline.results import OutputFolder
from tools.offline.stages import Stages
from tools.offline.tool import Failure
from tools.offline.vocoder import OfflineVocoder

STAGES = ("voice", "text", "llm", "token2wav", "audio_save")
MAX_TEXT_CHARS = 4096
GIVE_UP_BATCHES = 3  # in a row to which the LLM gave no answer because it is down

T = TypeVar("T")


@dataclass(eq=False)
class Job:
    """A sample on its way. Its text is spoken in segments, each an utterance of its own."""

    sample: Sample
    voice: Prompt
    segments: list[LLMPrompt]
    answers: list[GeneratedTokens] = field(default_factory=list)
    waveforms: dict[int, np.ndarray] = field(default_factory=dict)  # by the segment's index


@dataclass
class Outcome:
    """What a run has made so far."""

    finished: int = 0
    audio_seconds: float = 0.0
    tokens: int = 0
    cut_short: list[str] = field(default_factory=list)  # ids whose speech ends where the LLM had to stop
    failures: list[Failure] = field(default_factory=list)


@dataclass
class Pipeline:
    """`batch_size` samples at once up to the LLM, `token2wav_batch_size` utterances at once in the vocoder."""

    voices: Voices
    texts: TextFrontend
    llm: BatchLM
    vocoder: OfflineVocoder
    batch_size: int
    token2wav_batch_size: int
    sampling: Sampling
    stages: Stages = field(default_factory=lambda: Stages(STAGES))
    outcome: Outcome = field(default_factory=Outcome)

    def run(self, samples: Sequence[Sample], folder: OutputFolder, progress: "tqdm[Any]") -> None:
        """Make every sample's file. `outcome` and `stages` hold what was done, also after an interruption."""
        unanswered = 0
        for batch in batches(samples, self.batch_size):
            if unanswered < GIVE_UP_BATCHES:
                unanswered = 0 if self._make(batch, folder) else unanswered + 1
            else:
                for sample in batch:
                    self._fail(sample, "llm", UnavailableError("not tried: the LLM was down for those before"))
            progress.update(len(batch))
            progress.set_postfix(failed=len(self.outcome.failures))

    def _make(self, samples: Sequence[Sample], folder: OutputFolder) -> bool:
        """Whether the LLM is there, as far as these samples tell."""
        for sample in samples:
            folder.discard(sample)
        jobs = [job for sample in samples if (job := self._prepare(sample))]
        errors = self._speak(jobs)
        spoken = [job for job in jobs if job not in errors]
        self._render(spoken, folder)
        return bool(spoken) or not any(isinstance(error, UnavailableError) for error in errors.values())

    def _prepare(self, sample: Sample) -> Job | None:
        """The voice and the text, as the server prepares them; None where they cannot be used."""
        stage = "voice"
        try:
            with self.stages.time(stage):
                voice = self.voices(sample)
            stage = "text"
            with self.stages.time(stage):
                return Job(sample, voice, self._prompts(sample, voice))
        except Exception as error:
            self._fail(sample, stage, error)
            return None

    def _prompts(self, sample: Sample, voice: Prompt) -> list[LLMPrompt]:
        """One for each segment. The LLM continues the recording where it is known what that says."""
        text = clean_text(sample.target_text, name="target_text", max_chars=MAX_TEXT_CHARS)
        spoken = (self.texts.transcript(voice.text), voice.tokens.tolist()) if voice.text else ("", [])
        return [LLMPrompt(segment, *spoken) for segment in self.texts.segments(text)]

    def _speak(self, jobs: Sequence[Job]) -> dict[Job, Exception]:
        """Fill in the answers; what has none is a failure, and returned."""
        asked = [(job, segment) for job in jobs for segment in job.segments]
        with self.stages.time("llm"):
            answers = self.llm.generate([segment for _, segment in asked], self.sampling)
        errors: dict[Job, Exception] = {}
        for (job, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, GeneratedTokens):
                job.answers.append(answer)
            else:
                errors.setdefault(job, answer)
        for job, error in errors.items():
            self._fail(job.sample, "llm", error)
        return errors

    def _render(self, jobs: Sequence[Job], folder: OutputFolder) -> None:
        """Utterances of similar length together: a batch costs what its longest one costs in every row."""
        spoken = [(job, index) for job in jobs for index in range(len(job.answers))]
        spoken.sort(key=lambda place: len(place[0].answers[place[1]].tokens))
        errors: dict[Job, Exception] = {}
        for batch in batches(spoken, self.token2wav_batch_size):
            with self.stages.time("token2wav"):
                rendered = self.vocoder.whole([(job.voice, job.answers[index].tokens) for job, index in batch])
            for (job, index), audio in zip(batch, rendered, strict=True):
                if isinstance(audio, Exception):
                    errors.setdefault(job, audio)
                else:
                    job.waveforms[index] = audio
                if len(job.waveforms) == len(job.segments):
                    self._save(job, folder)
        for job, error in errors.items():
            self._fail(job.sample, "token2wav", error)

    def _save(self, job: Job, folder: OutputFolder) -> None:
        audio = np.concatenate([job.waveforms[index] for index in range(len(job.segments))])
        tokens = np.concatenate([answer.tokens for answer in job.answers])
        cut_short = any(answer.finish_reason == "length" for answer in job.answers)
        try:
            with self.stages.time("audio_save"):
                folder.save(job.sample, audio, tokens, cut_short)
        except Exception as error:
            self._fail(job.sample, "audio_save", error)
            return
        outcome = self.outcome
        outcome.finished += 1
        outcome.audio_seconds += len(audio) / SAMPLE_RATE
        outcome.tokens += len(tokens)
        outcome.cut_short += [job.sample.id] * cut_short

    def _fail(self, sample: Sample, stage: str, error: Exception) -> None:
        self.outcome.failures.append(Failure.of(sample, stage, error))


def batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
