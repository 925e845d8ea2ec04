"""Text to speech without a server: samples through LLM and token2wav to a folder of audio files."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from tqdm import tqdm

from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.load.report import table
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.offline.inputs import VoicePrompts, read_samples
from cosyvoice_triton.offline.llm import OfflineLLM, connect, engine_of, load_llm
from cosyvoice_triton.offline.pipeline import Pipeline
from cosyvoice_triton.offline.rendering import OfflineToken2Wav
from cosyvoice_triton.offline.results import OutputFolder, identity
from cosyvoice_triton.offline.tool import show_failures
from cosyvoice_triton.text import TextFrontend
from cosyvoice_triton.voice.audio import load_recording

WARM_UP = LLMPrompt("Hello.")
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
    with loaded_pipeline(args, sampling) as pipeline:
        loaded = time.perf_counter() - begun
        try:
            with tqdm(total=len(wanted), desc="synthesizing", unit="sample") as progress:
                pipeline.run(wanted, folder, progress)
        finally:
            figures = figures_of(args, pipeline, kept=kept, read=read, loaded=loaded)
            log = folder.log(figures)
    show(args, pipeline, figures)
    print(f"figures: {log}")
    show_failures(pipeline.outcome.failures, log.name)
    return 1 if pipeline.outcome.failures else 0


@contextmanager
def loaded_pipeline(args: argparse.Namespace, sampling: Sampling) -> Iterator[Pipeline]:
    """Yield the pipeline with everything loaded and warmed up."""
    tokenizer = LLMTokenizer.from_dir(args.llm_model_name_or_path)
    token2wav = OfflineToken2Wav.load(args.token2wav_path, args.device, streams=0, enable_trt=args.enable_trt)
    voices = VoicePrompts(token2wav.stack, args.token2wav_path, args.device, args.enable_trt)
    voices.warm_up()
    llm = backend_of(args, tokenizer)
    try:
        llm.generate([WARM_UP], Sampling(max_tokens=8, seed=0))
        yield Pipeline(
            voices=voices,
            texts=TextFrontend(token2wav.stack.name),
            llm=llm,
            token2wav=token2wav,
            batch_size=args.batch_size,
            token2wav_batch_size=args.token2wav_batch_size,
            sampling=sampling,
        )
    finally:
        llm.close()


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
        directories.append(engine_of(args.backend, args.llm_model_name_or_path, args.engine_dir, args.device)[1])
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(
                f"{directory} is not a directory: give a checkpoint, or make the demo checkpoint with `make demo`; "
                "`cosyvoice-triton prepare engine --kind onnxruntime_genai` writes what that engine loads"
            )
    return settings | {"checkpoints": [[str(path.resolve()), identity(path)] for path in dict.fromkeys(directories)]}


def backend_of(args: argparse.Namespace, tokenizer: LLMTokenizer) -> OfflineLLM:
    if args.backend == "trtllm-serve":
        return connect(args.openai_api_base, args.openai_model_name, tokenizer, args.batch_size)
    engine, directory = engine_of(args.backend, args.llm_model_name_or_path, args.engine_dir, args.device)
    return load_llm(engine, directory, tokenizer, args.batch_size, args.kv_cache_free_gpu_memory_fraction)


def figures_of(
    args: argparse.Namespace, pipeline: Pipeline, *, kept: int, read: float, loaded: float
) -> dict[str, Any]:
    """Return the figures of the run, with upstream's names where it has them."""
    outcome = pipeline.outcome
    return {
        "args": vars(args),
        "vocoder": pipeline.token2wav.name,
        "data_load_time_seconds": read,
        "model_load_time_seconds": loaded,
        **pipeline.stages.figures(outcome.audio_seconds, pipeline.stages.total()),
        "total_audio_duration_seconds": outcome.audio_seconds,
        "speech_tokens": outcome.tokens,
        "samples_finished": outcome.finished,
        "samples_kept": kept,
        "samples_failed": len(outcome.failures),
        "cut_short": outcome.cut_short,
        "failures": [failure._asdict() for failure in outcome.failures],
    }


def show(args: argparse.Namespace, pipeline: Pipeline, figures: dict[str, Any]) -> None:
    """Print the tables and the samples that were cut short."""
    outcome = pipeline.outcome
    print(f"{outcome.finished} samples, {outcome.audio_seconds:.1f} s of audio, {pipeline.token2wav.name}")
    stages = [*pipeline.stages.seconds, "pipeline"]
    print(table(("stage", "seconds", "RTF"), [(s, figures[f"{s}_time_seconds"], figures[f"{s}_rtf"]) for s in stages]))
    print()
    row = (args.backend, args.batch_size, *(figures[key] for key in ("llm_time_seconds", "pipeline_time_seconds")))
    header = ("Backend", "Batch Size", "llm_time_seconds", "total_time_seconds", "RTF")
    print(table(header, [(*row, figures["pipeline_rtf"])]))
    if outcome.cut_short:
        shown = ", ".join(outcome.cut_short[:CUT_SHORT_SHOWN])
        print(f"{len(outcome.cut_short)} samples were cut short by the token limit (log.txt: cut_short): {shown}")
