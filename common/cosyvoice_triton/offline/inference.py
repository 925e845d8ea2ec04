"""Text to speech without a server: samples through the pipeline to a folder of audio files.

An error fails only its own sample and is recorded.
"""

import argparse
import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cosyvoice_triton.config import LLMEngine, OrchestratorConfig, TensorrtLLMConfig
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import Sample, SampleError
from cosyvoice_triton.offline.shared import (
    SampleRun,
    WholeToken2Wav,
    described,
    read_samples,
    recording_of,
    set_up,
    show_failures,
    show_stages,
    speaker_runtime,
    stack_of,
    token2wav_config,
)
from cosyvoice_triton.orchestrator.assembly import Pipeline
from cosyvoice_triton.orchestrator.report import Events
from cosyvoice_triton.orchestrator.token_buffer import CUT_SHORT
from cosyvoice_triton.speaker.engines import LocalPromptEncoder, load_pipeline
from cosyvoice_triton.voice.audio import load_recording

JOURNAL = "samples.jsonl"
LOG = "log.txt"
STAGES = ("voice", "text", "llm", "token2wav", "audio_save")
GIVE_UP_BATCHES = 3  # consecutive batches for which the LLM was unavailable
CUT_SHORT_SHOWN = 10
# By backend. hf is upstream's name for whatever reads the HuggingFace directory: see `llm_engine`.
ENGINES: dict[str, LLMEngine] = {"trtllm": "tensorrt_llm", "vllm": "vllm", "onnxruntime_genai": "onnxruntime_genai"}
BACKENDS = ("hf", *ENGINES, "trtllm-serve")
# Timeout between tokens of a server. Longer than in serving, because no listener waits; an LLM that hangs must still be
# an error.
SILENT_SECONDS = 60.0


class OutputFolder:
    """The output folder of a run, which a second run can continue.

        <id>.wav         24 kHz
        samples.jsonl    one line per finished sample: hash of its inputs, seconds and speech tokens
        log.txt          the figures of the last run, as JSON

    A sample is finished if the last of its lines has the hash of the same text, recording and settings.
    settings: everything besides the samples that the audio depends on. SampleError if the folder cannot be made.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = json.dumps(settings, sort_keys=True, default=str)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SampleError(f"cannot write to {path}: {error}; choose another folder") from None
        self._finished = _read_journal(path / JOURNAL)

    def holds(self, sample: Sample) -> bool:
        """Return whether the sample is finished, with the same inputs and settings."""
        return self._finished.get(sample.id) == self._made_from(sample) and self.audio(sample).exists()

    def discard(self, sample: Sample) -> None:
        """Remove older audio of this id, so that a sample that fails now does not look finished."""
        self.audio(sample).unlink(missing_ok=True)

    def audio(self, sample: Sample) -> Path:
        return self.path / f"{sample.id}.wav"

    def record(self, sample: Sample, seconds: float, tokens: Sequence[int], cut_short: bool) -> None:
        """Record a finished sample, whose audio was rendered from the speech tokens (n,)."""
        record = {
            "id": sample.id,
            "made_from": self._made_from(sample),
            "seconds": seconds,
            "cut_short": cut_short,
            "target_text": sample.target_text,
            "target_audio_cosy2_tokens": list(tokens),
        }
        with (self.path / JOURNAL).open("a", encoding="utf-8") as journal:
            # A run that was killed may have left a line without its end.
            journal.write("\n" * (journal.tell() > 0) + json.dumps(record, ensure_ascii=False))

    def log(self, figures: Mapping[str, Any]) -> Path:
        """Write the figures of the run; return the file."""
        path = self.path / LOG
        path.write_text(json.dumps(figures, indent=4, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        return path

    def _made_from(self, sample: Sample) -> str:
        digest = hashlib.sha256(self._settings.encode())
        digest.update(json.dumps([sample.target_text, sample.prompt_text]).encode())
        if sample.prompt_audio is not None:
            digest.update(sample.prompt_audio.digest)
        return digest.hexdigest()


def identity(directory: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and modification times of a checkpoint's files."""
    stats = ((path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _read_journal(path: Path) -> dict[str, str]:
    """Return the hash in the last complete line of each sample."""
    finished = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            finished[str(record["id"])] = str(record["made_from"])
        except (ValueError, KeyError, TypeError):
            continue
    return finished


def run(args: argparse.Namespace) -> int:
    """Return the exit code. Raise ValueError, RuntimeError or OSError if it cannot start."""
    set_up()
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


def llm_engine(backend: str, model_dir: Path, given: Path | None, device: str) -> tuple[LLMEngine, Path]:
    """Return the engine of a backend in this process, and the directory that it loads: the LLM's own, or for the CPU
    engine the converted one next to it, or the one that is given."""
    engine = ENGINES.get(backend) or ("onnxruntime_genai" if device == "cpu" else "cuda")
    if engine == "onnxruntime_genai":
        return engine, given or model_dir.with_name(model_dir.name + "_genai")
    return engine, model_dir if engine == "cuda" else given or model_dir


def llm_configs(args: argparse.Namespace) -> tuple[OrchestratorConfig, TensorrtLLMConfig | None]:
    """Return the settings of the pipeline and of the LLM's engine, None for a server (trtllm-serve).

    The address of a server may have the path of an API, as upstream's --openai-api-base.
    """
    directory = args.llm_model_name_or_path
    speech: dict[str, Any] = {"model_dir": str(args.token2wav_path), "llm_tokenizer_dir": str(directory)}
    if args.backend == "trtllm-serve":
        base = args.openai_api_base.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
        speech |= {"llm_transport": "openai", "llm_urls": (base,), "llm_model": args.openai_model_name}
        return OrchestratorConfig(**speech, token_timeout=SILENT_SECONDS), None
    engine, loaded = llm_engine(args.backend, directory, args.engine_dir, args.device)
    llm = TensorrtLLMConfig(
        engine_dir=str(loaded),
        tokenizer_dir=str(directory),
        engine=engine,
        instance_kind="KIND_CPU" if args.device == "cpu" else "KIND_GPU",
        max_requests=args.batch_size,
        gpu_share=args.kv_cache_free_gpu_memory_fraction,
    )
    return OrchestratorConfig(**speech), llm


class OfflineRun(SampleRun):
    """Samples on their way to their files, `concurrency` at a time."""

    def __init__(self, pipeline: Pipeline, folder: OutputFolder, sampling: Sampling, concurrency: int) -> None:
        super().__init__(STAGES)
        self.pipeline, self.folder, self.sampling, self.concurrency = pipeline, folder, sampling, concurrency
        self.finished = self.tokens = 0
        self.cut_short: list[str] = []  # ids of samples that a limit of tokens cut short
        self.unanswered = 0  # samples in a row for which the LLM was unavailable

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
        with self.sample(sample) as enter:
            if self.unanswered >= GIVE_UP_BATCHES * self.concurrency:
                enter("llm")
                raise UnavailableError("not tried: the LLM was unavailable for the samples before")
            try:
                await self._spoken(sample, enter)
                self.unanswered = 0
            except UnavailableError:  # the rest is in this process
                self.unanswered += 1
                raise

    async def _spoken(self, sample: Sample, enter: Callable[[str], None]) -> None:
        enter("voice")
        recording = recording_of(sample)
        enter("text")
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
                enter(following[name])

        audio = await self.pipeline.synthesizer.offline(request, Events(warnings.append, reached, segment_ended))
        enter("audio_save")
        cut_short = any(warning.startswith(CUT_SHORT) for warning in warnings)
        self.save(self.folder.audio(sample), audio)
        self.folder.record(sample, len(audio) / SAMPLE_RATE, tokens, cut_short)
        self.finished += 1
        self.tokens += len(tokens)
        self.cut_short += [sample.id] * cut_short

    def figures(self, total: float | None = None) -> dict[str, Any]:
        """Return the figures of the run, with upstream's names where it has them."""
        return {
            **super().figures(total),
            "total_audio_duration_seconds": self.audio_seconds,
            "speech_tokens": self.tokens,
            "samples_finished": self.finished,
            "samples_failed": len(self.failures),
            "cut_short": self.cut_short,
            "failures": self.failures,
        }


def show(args: argparse.Namespace, made: OfflineRun, figures: dict[str, Any]) -> None:
    """Print the tables and the samples that were cut short."""
    print(f"{made.finished} samples, {made.audio_seconds:.1f} s of audio, {figures['vocoder']}")
    show_stages(figures, STAGES)
    print()
    row = (args.backend, args.batch_size, *(figures[key] for key in ("llm_time_seconds", "pipeline_time_seconds")))
    header = ("Backend", "Batch Size", "llm_time_seconds", "total_time_seconds", "RTF")
    print(table(header, [(*row, figures["pipeline_rtf"])]))
    if made.cut_short:
        shown = ", ".join(made.cut_short[:CUT_SHORT_SHOWN])
        print(f"{len(made.cut_short)} samples were cut short by the token limit (log.txt: cut_short): {shown}")
