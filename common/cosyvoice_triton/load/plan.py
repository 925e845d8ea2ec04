"""The load of a run and its requests, which are rows of a manifest or data set, or the command line's, repeated."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cosyvoice_triton.arguments import boolean, natural_int, positive_int
from cosyvoice_triton.client.answer import TIMELINE
from cosyvoice_triton.client.arguments import request_parameters, utterance_of
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.load.samples import Sample, read_dataset, read_manifest
from cosyvoice_triton.text.segments import expected_seconds

CUT = 10  # a new voice lacks up to a tenth of its recording
REALISTIC_SECONDS, REALISTIC_NEW, REALISTIC_CANCELLED = (1, 30), 0.05, 0.1  # of audio; shares of the requests
ONE_REQUEST = "test"  # its id and its split, as upstream names them
REFUSED_PAUSE = 1.0  # seconds until a task whose request was refused sends its next one
MIN_WARMUP = 8  # so that the server has cached the voices of a small manifest, unless --new-voices


@dataclass(frozen=True)
class LoadJob:
    """One request; `id` names its audio file.

    new_voice: cut its recording, so that no server has the voice cached. cancel_after, cancel_after_parts: seconds, or
    parts of the answer, until the caller leaves. door: through which it goes, "" for any. expected: pattern of the
    error that must be its answer, "" for none.
    """

    id: str
    base: Utterance
    new_voice: bool = False
    cancel_after: float | None = None
    cancel_after_parts: int | None = None
    door: str = ""
    expected: str = ""

    def utterance(self) -> Utterance:
        if not self.new_voice or self.base.reference is None:
            return self.base
        # Unseeded, because a server has earlier runs cached. Of its own length, because no two people's are equal.
        random, most = np.random.default_rng(), len(self.base.reference)
        reference = self.base.reference[: random.integers(most - most // CUT, most + 1)].copy()
        reference[-8:] += random.uniform(-1e-3, 1e-3, 8).astype(np.float32)  # inaudible
        return dataclasses.replace(self.base, reference=reference)

    def realistic(self, random: np.random.Generator) -> "LoadJob":
        """Return the job as a service with many callers gets it: an answer of 1 to 30 s, some in a new voice, some
        cancelled while they are heard."""
        seconds, text = random.uniform(*REALISTIC_SECONDS), self.base.target_text
        base = dataclasses.replace(
            self.base,
            target_text=" ".join([text] * math.ceil(seconds / expected_seconds(text))),
            # Ends speech of random weights, too, which the text does not.
            parameters=self.base.parameters | {"max_tokens": round(seconds * TOKEN_RATE)},
        )
        new, cancelled = random.random(2) < (REALISTIC_NEW, REALISTIC_CANCELLED)
        return LoadJob(self.id, base, self.new_voice or bool(new), random.uniform(0, seconds) if cancelled else None)


def add_job_arguments(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Add the options of the requests and return the group of the measurement's; the caller adds tasks or rates."""
    data = parser.add_argument_group("many requests", "instead of one --target-text; columns: see docs/clients.md")
    data.add_argument(
        "--manifest-path", type=Path, help="JSON lines as in cosyvoice_triton/samples/manifest.jsonl, or a .lst file"
    )
    data.add_argument("--huggingface-dataset", help="a data set by name, such as yuekai/seed_tts; needs a network")
    data.add_argument("--split-name", default="wenetspeech4tts", help="of the data set (default: wenetspeech4tts)")
    data.add_argument("--num-requests", type=positive_int, help="rows are repeated or dropped to make this many")
    data.add_argument(
        "--use-spk2info-cache",
        type=boolean,
        nargs="?",
        const=True,
        default=False,
        help="send only the text: the server uses its default voice (default_speaker, or 001 of its spk2info.pt)",
    )
    data.add_argument(
        "--new-voices",
        action="store_true",
        help="cut the end of each request's recording at random, so that the server has no voice cached",
    )
    data.add_argument(
        "--realistic",
        action="store_true",
        help="answers of 1 to 30 s, 5 %% in new voices, 10 %% cancelled while they are heard",
    )
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--warmup-requests",
        type=natural_int,
        help=f"sent first and not counted (default: one per task, at least {MIN_WARMUP} of different rows)",
    )
    return group


@dataclass(frozen=True)
class Jobs:
    """All requests of a run. split: part of the names of the report's files. rows: a job of each."""

    split: str
    rows: Sequence[LoadJob]
    realistic: bool = False

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Jobs":
        """Read the requests that the options select; ValueError or ClientError if they cannot be read."""
        if args.manifest_path is not None:
            split, samples = args.manifest_path.stem, read_manifest(args.manifest_path, limit=args.num_requests)
        elif args.huggingface_dataset is not None:
            split = args.split_name
            samples = read_dataset(args.huggingface_dataset, split, limit=args.num_requests)
        else:
            base = utterance_of(args)
            base = Utterance(base.target_text) if args.use_spk2info_cache else base
            base = dataclasses.replace(base, parameters=request_parameters(args) | {TIMELINE: True})
            return cls(ONE_REQUEST, [LoadJob(ONE_REQUEST, base, args.new_voices)], args.realistic)
        for option in ("target_text", "reference_audio", "reference_text"):
            if getattr(args, option) is not None:
                raise ClientError(f"--{option.replace('_', '-')} with {split}: each row has its own")
        rows = [LoadJob(sample.id, _utterance(sample, args), args.new_voices) for sample in samples]
        return cls(split, rows, args.realistic)

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, args: argparse.Namespace, count: int, tasks: int, **how: Any) -> "Load":
        """Return the load of so many requests, with the options that clients share. how: its other fields."""
        first = max(tasks, min(len(self), MIN_WARMUP)) if args.warmup_requests is None else args.warmup_requests
        asked = {"model": args.model_name, "mode": args.mode, "timeout": args.timeout}
        return Load(jobs=self.take(count), warmup=self.take(first), tasks=tasks, **asked, **how)

    def take(self, count: int) -> list[LoadJob]:
        """Return `count` jobs, cycling through the rows."""
        jobs, random = [], np.random.default_rng(0)
        for index, row in enumerate(islice(cycle(self.rows), count)):
            turn = index // len(self) + 1
            job = dataclasses.replace(row, id=f"{row.id}@{turn}") if turn > 1 else row
            jobs.append(job.realistic(random) if self.realistic else job)
        return jobs


def _utterance(sample: Sample, args: argparse.Namespace) -> Utterance:
    """Return the request of a row, with its own voice, that of --speaker, or the server's default."""
    parameters, instruction = request_parameters(args) | {TIMELINE: True}, args.instruct_text or None
    if args.speaker or args.use_spk2info_cache:
        named = args.speaker or None
        return Utterance(sample.target_text, parameters=parameters, speaker=named, instruct_text=instruction)
    own = dataclasses.replace(sample.utterance(parameters), instruct_text=instruction)
    return dataclasses.replace(own, reference_text=None) if args.cross_lingual or instruction else own


@dataclass(frozen=True)
class Load:
    """The requests of a run and the servers that receive them.

    servers: an address each, see `doors`; tasks and requests are distributed over them in turn. tasks: of the closed
    loop, over all servers. rate: requests per second of the open loop, None for the closed loop. listening: a task of
    the closed loop waits until its audio has been played before the next request. warmup: jobs that run first and are
    not counted. seconds: for which the closed loop sends requests. timeout: of a whole answer; patience: without any
    part of it. persistent: a server that ends comes back; a task sends nothing for `pause` seconds after an error then,
    otherwise only after a refusal. audio_dir: where the audio is written, None to drop it.
    """

    servers: Sequence[str]
    model: str
    mode: Literal["streaming", "offline"]
    jobs: Sequence[LoadJob]
    warmup: Sequence[LoadJob] = ()
    tasks: int = 1
    rate: float | None = None
    listening: bool = False
    seconds: float = float("inf")
    timeout: float = 120.0
    patience: float | None = None
    persistent: bool = False
    pause: float = REFUSED_PAUSE
    audio_dir: Path | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings, JSON-ready."""
        return {
            "servers": list(self.servers),
            "model": self.model,
            "mode": self.mode,
            "num_tasks": None if self.rate is not None else self.tasks,
            "request_rate": self.rate,
            "listening": self.listening,
            "warmup_requests": len(self.warmup),
            "timeout_seconds": self.timeout,
        }

    def shape(self) -> str:
        """Describes the load in a few words."""
        if self.rate is not None:
            return f"{self.rate:g} requests per second"
        return f"{self.tasks} listeners" if self.listening else f"{self.tasks} at once"
