"""From samples to audio files, batch by batch: voices and texts, LLM, token2wav, files.

The stages run one after another, so their times do not overlap. An error fails only its own sample and is recorded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.offline.inputs import VoicePrompts
from cosyvoice_triton.offline.llm import GeneratedTokens, OfflineLLM
from cosyvoice_triton.offline.rendering import OfflineToken2Wav
from cosyvoice_triton.offline.results import OutputFolder
from cosyvoice_triton.offline.stages import Stages
from cosyvoice_triton.offline.tool import Failure
from cosyvoice_triton.text import TextFrontend, clean_text
from cosyvoice_triton.text.markup import Pause
from cosyvoice_triton.voice.prompt import Prompt

STAGES = ("voice", "text", "llm", "token2wav", "audio_save")
GIVE_UP_BATCHES = 3  # consecutive batches for which the LLM was unavailable

T = TypeVar("T")


@dataclass(eq=False)
class SampleJob:
    """A sample in progress. Its text is synthesized in segments, each as a separate utterance."""

    sample: Sample
    voice: Prompt
    segments: list[LLMPrompt]
    answers: list[GeneratedTokens] = field(default_factory=list)
    waveforms: dict[int, np.ndarray] = field(default_factory=dict)  # by segment index


@dataclass
class PipelineOutcome:
    """Results of a run so far."""

    finished: int = 0
    audio_seconds: float = 0.0
    tokens: int = 0
    cut_short: list[str] = field(default_factory=list)  # ids of samples that the token limit cut short
    failures: list[Failure] = field(default_factory=list)


@dataclass
class Pipeline:
    """batch_size: samples per batch up to the LLM; token2wav_batch_size: utterances per batch in token2wav."""

    voices: VoicePrompts
    texts: TextFrontend
    llm: OfflineLLM
    token2wav: OfflineToken2Wav
    batch_size: int
    token2wav_batch_size: int
    sampling: Sampling
    stages: Stages = field(default_factory=lambda: Stages(STAGES))
    outcome: PipelineOutcome = field(default_factory=PipelineOutcome)

    def run(self, samples: Sequence[Sample], folder: OutputFolder, progress: "tqdm[Any]") -> None:
        """Write the file of every sample. `outcome` and `stages` are valid after an interruption too."""
        unanswered = 0
        for batch in batches(samples, self.batch_size):
            if unanswered < GIVE_UP_BATCHES:
                unanswered = 0 if self._make(batch, folder) else unanswered + 1
            else:
                for sample in batch:
                    self._fail(
                        sample, "llm", UnavailableError("not tried: the LLM was unavailable for the samples before")
                    )
            progress.update(len(batch))
            progress.set_postfix(failed=len(self.outcome.failures))

    def _make(self, samples: Sequence[Sample], folder: OutputFolder) -> bool:
        """Make the samples' audio; return whether the LLM was available."""
        for sample in samples:
            folder.discard(sample)
        jobs = [job for sample in samples if (job := self._prepare(sample))]
        errors = self._generate(jobs)
        answered = [job for job in jobs if job not in errors]
        self._render(answered, folder)
        return bool(answered) or not any(isinstance(error, UnavailableError) for error in errors.values())

    def _prepare(self, sample: Sample) -> SampleJob | None:
        """Return voice and text, prepared as by the server; None if they cannot be used."""
        stage = "voice"
        try:
            with self.stages.time(stage):
                voice = self.voices(sample)
            stage = "text"
            with self.stages.time(stage):
                return SampleJob(sample, voice, self._prompts(sample, voice))
        except Exception as error:
            self._fail(sample, stage, error)
            return None

    def _prompts(self, sample: Sample, voice: Prompt) -> list[LLMPrompt]:
        """Return one prompt per segment. With a transcript the LLM continues the recording."""
        text = clean_text(sample.target_text, name="target_text", max_chars=OrchestratorConfig.max_text_chars)
        prompt = (self.texts.transcript(voice.text), voice.tokens.tolist()) if voice.text else ("", [])
        segments = list(self.texts.segments(text))
        if any(isinstance(segment, Pause) for segment in segments):
            raise ValueError("pauses are not supported here")
        return [LLMPrompt(str(segment), *prompt) for segment in segments]

    def _generate(self, jobs: Sequence[SampleJob]) -> dict[SampleJob, Exception]:
        """Fill in `answers`; return the errors."""
        requested = [(job, segment) for job in jobs for segment in job.segments]
        with self.stages.time("llm"):
            answers = self.llm.generate([segment for _, segment in requested], self.sampling)
        errors: dict[SampleJob, Exception] = {}
        for (job, _), answer in zip(requested, answers, strict=True):
            if isinstance(answer, GeneratedTokens):
                job.answers.append(answer)
            else:
                errors.setdefault(job, answer)
        for job, error in errors.items():
            self._fail(job.sample, "llm", error)
        return errors

    def _render(self, jobs: Sequence[SampleJob], folder: OutputFolder) -> None:
        """Batch utterances of similar length, because every row of a batch costs as much as its longest one."""
        utterances = [(job, index) for job in jobs for index in range(len(job.answers))]
        utterances.sort(key=lambda entry: len(entry[0].answers[entry[1]].tokens))
        errors: dict[SampleJob, Exception] = {}
        for batch in batches(utterances, self.token2wav_batch_size):
            with self.stages.time("token2wav"):
                rendered = self.token2wav.whole([(job.voice, job.answers[index].tokens) for job, index in batch])
            for (job, index), audio in zip(batch, rendered, strict=True):
                if isinstance(audio, Exception):
                    errors.setdefault(job, audio)
                else:
                    job.waveforms[index] = audio
                if len(job.waveforms) == len(job.segments):
                    self._save(job, folder)
        for job, error in errors.items():
            self._fail(job.sample, "token2wav", error)

    def _save(self, job: SampleJob, folder: OutputFolder) -> None:
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
