"""Inputs of the offline tools: options, samples, and speech tokens that are there already."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.load.samples import Sample, SampleError, read_dataset, read_manifest
from cosyvoice_triton.text import clean_line
from cosyvoice_triton.voice.prompt import Recording, validate_reference


def add_data_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """Add options that select the samples. split: upstream's name for this tool's option of a data set's split."""
    parser.add_argument("--manifest-path", type=Path, help="JSON lines or seed-tts .lst; default: ten sentences")
    parser.add_argument(split, dest="split_name", help="split of a HuggingFace data set, such as wenetspeech4tts")
    parser.add_argument(
        "--dataset-name",
        help="default: yuekai/CV3-Eval for splits with 'zero' in their name, else yuekai/seed_tts_cosy2",
    )


def add_trt_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--enable-trt",
        action="store_true",
        help="run the flow's estimator and the speaker encoder from their TensorRT plans (docs/gpu.md), on a GPU",
    )


def read_samples(args: argparse.Namespace) -> list[Sample]:
    """Return the samples that the options select. Raise SampleError if they cannot be read."""
    if args.manifest_path and (args.split_name or args.dataset_name):
        raise SampleError("give a manifest or a data set, not both")
    if args.dataset_name and not args.split_name:
        raise SampleError(f"which split of {args.dataset_name}? name it")
    if args.split_name:
        name = args.dataset_name or ("yuekai/CV3-Eval" if "zero" in args.split_name else "yuekai/seed_tts_cosy2")
        found = read_dataset(name, args.split_name)
    else:
        found = read_manifest(args.manifest_path or samples.MANIFEST)
    if nameless := [sample.id for sample in found if sample.prompt_audio is None]:
        raise SampleError(f"sample {nameless[0]!r} names a speaker; offline tools need prompt_audio")
    return found


def add_token2wav_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the tools that render existing speech tokens."""
    parser.add_argument(
        "--model-dir",
        type=Path,
        default=Path("models/demo", stacks.DEFAULT.checkpoint),
        help="token2wav checkpoint of any stack (default: %(default)s)",
    )
    add_data_arguments(parser, "--huggingface-dataset-split")
    parser.add_argument("--tokens-path", type=Path, help="JSON lines of id and target_audio_cosy2_tokens")
    parser.add_argument("--output-dir", type=Path, default=Path("out/generated_wavs"), help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_trt_argument(parser)


def with_tokens(samples: Sequence[Sample], path: Path | None) -> list[Sample]:
    """Return the samples with the tokens of `path`: JSON lines of `id` and `target_audio_cosy2_tokens`."""
    if path is None:
        return list(samples)
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        tokens = {str(row["id"]): np.asarray(row["target_audio_cosy2_tokens"], np.int64) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SampleError(
            f"cannot read the tokens in {path}: {type(error).__name__} {error}; "
            "`cosyvoice-triton offline` writes such a file, samples.jsonl"
        ) from None
    if missing := [sample.id for sample in samples if sample.id not in tokens]:
        raise SampleError(f"{path} has no tokens for {len(missing)} sample(s), the first is {missing[0]!r}")
    return [replace(sample, target_audio_cosy2_tokens=tokens[sample.id]) for sample in samples]


def recording_of(sample: Sample) -> Recording:
    """Return the sample's recording and transcript. ValueError if one of them cannot be used."""
    recording = sample.prompt_audio
    assert recording is not None  # checked by `read_samples`
    validate_reference(recording.wav, rate=recording.rate)
    text = clean_line(sample.prompt_text, name="prompt_text", max_chars=OrchestratorConfig.max_text_chars)
    return replace(recording, text=text)
