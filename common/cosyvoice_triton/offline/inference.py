"""Text to speech without a server: samples through the pipeline to a folder of audio files.

An error fails only its own sample and is recorded.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.offline.engines import (
    WholeToken2Wav,
    described,
    llm_configs,
    llm_engine,
    speaker_runtime,
    stack_of,
    token2wav_config,
)
from cosyvoice_triton.offline.inputs import read_samples, recording_of
from cosyvoice_triton.offline.results import OutputFolder, identity
from cosyvoice_triton.offline.tool import Failure, Stages, show_failures
from cosyvoice_triton.orchestrator.assembly import Pipeline
from cosyvoice_triton.orchestrator.token_buffer import CUT_SHORT
from cosyvoice_triton.speaker.engines import LocalPromptEncoder, load_pipeline
from cosyvoice_triton.voice.audio import load_recording

STAGES = ("voice", "text", "llm", "token2wav", "audio_save")
GIVE_UP_BATCHES = 3  # consecutive batches for which the LLM was unavailable
CUT_SHORT_SHOWN = 10


def run(args: argparse.Namespace) -> int:
    """Return the exit code. Raise ValueError, RuntimeError or OSError if it cannot start."""
    begun = time.perf_counter()
    samples = in_one_voice(args, read_samples(args))
    read = time.perf_counter() - begun
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    folder = OutputFolder(args.output_dir, settings_of(args, sampling))
    wanted = [sample for sample in samples if not folder.holds(sample)]
    if kept := len(samples) - len(wanted):
        print(f"{kept} of {len(samples)} samples are finished in {folder.path} and are kept")
    if not wanted:
        return 0
    begun = time.perf_counter()
    with ExitStack() as closing:
        stack = stack_of(args.token2wav_path)
        # Without CUDA graphs: start-up is fast, and most of a GPU's memory stays free.
        config = token2wav_config(args, args.token2wav_path, "torch", 1)
        whole = WholeToken2Wav(stack, config, args.token2wav_batch_size)
        closing.callback(whole.close)
        encoder = LocalPromptEncoder(stack, args.token2wav_path, args.device, speaker_runtime(args))
        closing.callback(encoder.close)
        pipeline = load_pipeline(stack, *llm_configs(args), encoder, whole, closing)
        loaded = time.perf_counter() - begun
        made = OfflineRun(pipeline, folder, sampling, args.batch_size)
        try:
            asyncio.run(made.speak_all(wanted))
        finally:
            figures = made.figures() | {"data_load_time_seconds": read, "model_load_time_seconds": loaded}
            figures |= {"args": vars(args), "vocoder": described(stack, args.token2wav_path), "samples_kept": kept}
            log = folder.log(figures)
    show(args, made, figures)
    print(f"figures: {log}")
    show_failures(made.failures, log.name)
    return 1 if made.failures else 0


def in_one_voice(args: argparse.Namespace, samples: list[Sample]) -> list[Sample]:
    """Return the samples with the voice of --prompt-speech-path, if given."""
    if args.prompt_speech_path is None:
        if args.prompt_text:
            raise ValueError(
                f"--prompt-text {args.prompt_text!r} is the transcript of --prompt-speech-path: give that too"
            )
        return samples
    recording = load_recording(args.prompt_speech_path)
    return [replace(sample, prompt_audio=recording, prompt_text=args.prompt_text or "") for sample in samples]


def settings_of(args: argparse.Namespace, sampling: Sampling) -> dict[str, Any]:
    """Return everything besides text and voice that the audio of a sample depends on."""
    settings: dict[str, Any] = {name: getattr(args, name) for name in ("backend", "device", "enable_trt")}
    settings["sampling"] = asdict(sampling)
    directories = [args.llm_model_name_or_path, args.token2wav_path]
    if args.backend == "trtllm-serve":
        settings["server_model"] = args.openai_model_name
    else:
        directories.append(llm_engine(args.backend, args.llm_model_name_or_path, args.engine_dir, args.device)[1])
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(
                f"{directory} is not a directory: give a checkpoint, or make the demo checkpoint with `make demo`; "
                "`cosyvoice-triton prepare engine --kind onnxruntime_genai` writes what that engine loads"
            )
    return settings | {"checkpoints": [[str(path.resolve()), identity(path)] for path in dict.fromkeys(directories)]}


@dataclass
class OfflineRun:
    """Samples on their way to their files, `concurrency` at a time. Valid after an interruption, too."""

    pipeline: Pipeline
    folder: OutputFolder
    sampling: Sampling
    concurrency: int
    stages: Stages = field(default_factory=lambda: Stages(STAGES))
    finished: int = 0
    audio_seconds: float = 0.0
    tokens: int = 0
    cut_short: list[str] = field(default_factory=list)  # ids of samples that a limit of tokens cut short
    failures: list[Failure] = field(default_factory=list)
    unanswered: int = 0  # samples in a row for which the LLM was unavailable

    async def speak_all(self, samples: Sequence[Sample]) -> None:
        places = asyncio.Semaphore(self.concurrency)
        with tqdm(total=len(samples), desc="synthesizing", unit="sample") as progress:

            async def speak(sample: Sample) -> None:
                async with places:
                    await self.speak(sample)
                progress.update()
                progress.set_postfix(failed=len(self.failures))

            try:
                await asyncio.gather(*map(speak, samples))
            finally:
                await self.pipeline.llm.aclose()

    async def speak(self, sample: Sample) -> None:
        """Write the sample's file, or record why there is none."""
        self.folder.discard(sample)
        stage = SampleStage(self.stages)
        try:
            if self.unanswered >= GIVE_UP_BATCHES * self.concurrency:
                stage.enter("llm")
                raise UnavailableError("not tried: the LLM was unavailable for the samples before")
            await self._spoken(sample, stage)
            self.unanswered = 0
        except Exception as error:
            if stage.name == "llm" and isinstance(error, UnavailableError):
                self.unanswered += 1
            self.failures.append(Failure.of(sample, stage.name, error))
        finally:
            stage.leave()

    async def _spoken(self, sample: Sample, stage: "SampleStage") -> None:
        stage.enter("voice")
        recording = recording_of(sample)
        stage.enter("text")
        request = self.pipeline.rules.request(sample.target_text)
        request = replace(request, voice=recording, sampling=self.sampling, trim_silence=False)
        warnings: list[str] = []
        tokens: list[int] = []

        def segment_ended(text: str, samples: int, of_segment: Sequence[int]) -> None:
            tokens.extend(of_segment)

        # Each stage of the pipeline ends the one before.
        following = {"voice": "llm", "tokens": "token2wav", "audio": "llm"}

        def reached(name: str) -> None:
            if name in following:
                stage.enter(following[name])

        audio = await self.pipeline.synthesizer.offline(request, warnings.append, reached, segment_ended)
        stage.enter("audio_save")
        cut_short = any(warning.startswith(CUT_SHORT) for warning in warnings)
        self.folder.save(sample, audio, np.asarray(tokens), cut_short)
        self.finished += 1
        self.audio_seconds += len(audio) / SAMPLE_RATE
        self.tokens += len(tokens)
        self.cut_short += [sample.id] * cut_short

    def figures(self) -> dict[str, Any]:
        """Return the figures of the run, with upstream's names where it has them."""
        return {
            **self.stages.figures(self.audio_seconds),
            "total_audio_duration_seconds": self.audio_seconds,
            "speech_tokens": self.tokens,
            "samples_finished": self.finished,
            "samples_failed": len(self.failures),
            "cut_short": self.cut_short,
            "failures": [failure._asdict() for failure in self.failures],
        }


class SampleStage:
    """The stage that a sample is in; `name` is kept after it has left it."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._entered = False
        self.name = ""

    def enter(self, name: str) -> None:
        self.leave()
        self._stages.enter(name)
        self.name, self._entered = name, True

    def leave(self) -> None:
        if self._entered:
            self._stages.leave(self.name)
            self._entered = False


def show(args: argparse.Namespace, made: OfflineRun, figures: dict[str, Any]) -> None:
    """Print the tables and the samples that were cut short."""
    print(f"{made.finished} samples, {made.audio_seconds:.1f} s of audio, {figures['vocoder']}")
    stages = [*STAGES, "pipeline"]
    print(table(("stage", "seconds", "RTF"), [(s, figures[f"{s}_time_seconds"], figures[f"{s}_rtf"]) for s in stages]))
    print()
    row = (args.backend, args.batch_size, *(figures[key] for key in ("llm_time_seconds", "pipeline_time_seconds")))
    header = ("Backend", "Batch Size", "llm_time_seconds", "total_time_seconds", "RTF")
    print(table(header, [(*row, figures["pipeline_rtf"])]))
    if made.cut_short:
        shown = ", ".join(made.cut_short[:CUT_SHORT_SHOWN])
        print(f"{len(made.cut_short)} samples were cut short by the token limit (log.txt: cut_short): {shown}")
