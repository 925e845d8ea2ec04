"""Distil the DiT flow of a checkpoint to a few Euler steps without guidance, on a CPU and without any speech.

    python -m demo_voice.training.distil models/demo out/few_steps [--seconds 1500]

The result is a copy of the checkpoint with the student as its flow, and the `flow.json` that states its solve. From the
same noise, the student learns to reach in each step what the teacher's guided solve reaches in several; it solves whole
paths, so that it corrects its own errors. Only the estimator is trained. Conditions are what the checkpoint's LLM says
in its voices, with the attention masks of streams.
"""

import copy
import json
import random
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser
from cosyvoice_triton.constants import EULER_STEPS, LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.demo_checkpoint import VOICES_DIR
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.networks.flow import DiTFlow, load_dit_flow
from cosyvoice_triton.networks.flow.base import FlowMatching, time_schedule
from cosyvoice_triton.offline.llm import GeneratedTokens, engine_of, load_llm
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.files import read_recording
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

from demo_voice.training import flow, flow_dit
from demo_voice.training.grammar import OBJECTS, everyday_sentence
from demo_voice.training.training import TrainingRun, adamw, descend, prepare, trained

# The student's steps end where these of the teacher's end: the last ones, in which speech takes shape, are shorter.
ENDS = (5, 8, EULER_STEPS)
TIME_GRID = [round([*time_schedule(EULER_STEPS)[0], 1.0][step], 4) for step in (0, *ENDS)]
SENTENCES = 120  # in each voice: some 8,000 tokens
TARGET_TOKENS = 100  # of a crop, after the prompt
NEW_CROPS = 0.5  # share of the time in which every step has a new crop; the teacher's solve takes longer than a step
STREAMING = 0.75  # share of crops; the others are whole utterances
PEAK_RATE = 4e-4

Speaker = tuple[Prompt, np.ndarray]  # a voice, and speech tokens (n,) of its utterances, one after another


class Crop(NamedTuple):
    """What the estimator is given for a crop, and the states (steps + 1, 1, 80, T) of the teacher's solve, of which the
    first is the noise. mu, condition: (1, 80, T); speaker: (1, 80); valid: (1, 1 or T, T)."""

    mu: Tensor
    speaker: Tensor
    condition: Tensor
    valid: Tensor
    states: Tensor


def speak(models: Path) -> list[Speaker]:
    """Return each voice of the checkpoint with what its LLM says in it."""
    stack = stacks.DIT
    encode = ReferenceEncoder(stack, models / stack.checkpoint)
    tokenizer = LLMTokenizer.from_dir(directory := models / stack.llm.directory)
    rng, words, found = random.Random(1), [thing.split()[-1] for thing in OBJECTS], []
    with closing(load_llm(*engine_of("hf", directory, None, "cpu"), tokenizer, batch_size=8)) as llm:
        for path in sorted((models / VOICES_DIR).glob("*.wav")):
            prompt = encode(read_recording(path))
            texts = [everyday_sentence(rng, words).capitalize() for _ in range(SENTENCES)]
            spoken = [LLMPrompt(text, prompt.text, prompt.tokens.tolist()) for text in texts]
            answers = llm.generate(spoken, Sampling(seed=1))
            found.append((prompt, np.concatenate([x.tokens for x in answers if isinstance(x, GeneratedTokens)])))
    return found


def random_crop(speaker: Speaker) -> flow.Batch:
    """Return the prompt of a speaker, then a random crop of its utterances, as a batch of one; of its mel, the prompt's
    only."""
    prompt, tokens = speaker
    begin = random.randrange(len(tokens) - TARGET_TOKENS - LOOKAHEAD_TOKENS)
    crop = torch.from_numpy(np.concatenate([prompt.tokens, tokens[begin:][: TARGET_TOKENS + LOOKAHEAD_TOKENS]]))
    if random.random() < flow.END_OF_UTTERANCE:
        crop[-LOOKAHEAD_TOKENS:] = flow.ABSENT
    condition = F.pad(torch.from_numpy(prompt.mel.T)[None], (0, TOKEN_MEL_RATIO * TARGET_TOKENS))
    embedding, length = torch.from_numpy(prompt.embedding), torch.tensor([len(prompt.tokens)])
    return flow.Batch(crop[None], condition, condition, embedding[None], length)


def states(decoder: FlowMatching, crop: Crop, steps: int) -> Tensor:
    """Return the states (steps + 1, 1, 80, T) of a solve from the crop's noise, with gradients."""
    passed: list[Tensor] = []

    def velocity(_: int, x: Tensor, *rest: Tensor) -> Tensor:
        passed.append(x[:1])
        return decoder.estimator(x, *rest, valid=crop.valid.repeat(decoder.rows, 1, 1))

    end = decoder.solve(velocity, crop.states[0], crop.mu, crop.speaker, crop.condition, steps)
    return torch.stack([*passed, end])


@torch.no_grad()
def solved(teacher: DiTFlow, batch: flow.Batch, streaming: bool) -> Crop:
    """Return a crop as the teacher solves it from random noise, with its states where the student's steps end."""
    ahead, visible, mask = flow_dit.view(batch, streaming)
    mu = teacher.encode_window(ahead, visible).transpose(1, 2)  # (1, T, mel) -> (1, mel, T)
    noise = torch.randn_like(mu)[None]
    crop = Crop(mu, teacher.project_speaker(batch.embedding), batch.condition, mask["valid"], noise)
    return crop._replace(states=states(teacher.decoder, crop, EULER_STEPS)[[0, *ENDS]])


def distil(teacher: DiTFlow, speakers: Sequence[Speaker], path: Path, seconds: float) -> DiTFlow:
    """Return the student after `seconds` of training. path: of the estimator's trained weights, see `TrainingRun`."""
    student = copy.deepcopy(teacher)
    estimator = student.decoder.estimator.requires_grad_(True)
    student.decoder = FlowMatching(estimator, guidance=0.0, time_grid=TIME_GRID)
    optimizer = adamw(estimator.parameters(), PEAK_RATE)
    crops: list[Crop] = []
    run = TrainingRun(path, seconds, estimator, [optimizer])
    for share in run:
        if new := share < NEW_CROPS:
            crops.append(solved(teacher, random_crop(random.choice(speakers)), random.random() < STREAMING))
        crop = crops[-1] if new else random.choice(crops)
        error = (states(student.decoder, crop, len(ENDS)) - crop.states)[1:] / flow.MEL_DEVIATION
        squared, absolute = error.square().mean(), error[-1].abs().mean()
        descend(squared + absolute, optimizer, clip=1.0)
        run.losses(states=squared.detach(), mel=absolute.detach())
    estimator.load_state_dict(trained(path))
    return student


def export(student: DiTFlow, path: Path) -> None:
    """Write the student's `flow.pt`, float16, and beside it the `flow.json` that states its solve."""
    torch.save({name: tensor.half() for name, tensor in student.state_dict().items()}, path)
    solve = json.dumps({"steps": len(ENDS), "time_grid": TIME_GRID, "guidance": 0.0})
    path.with_suffix(".json").write_text(solve + "\n", encoding="utf-8")


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("models", type=Path, help="checkpoints, such as models/demo")
    parser.add_argument("output", type=Path, help="folder for the copy")
    parser.add_argument("--seconds", type=float, default=1500.0, help="of training (default: 1500)")
    args = parser.parse_args()
    prepare("cpu", seed=1)
    shutil.copytree(args.models, args.output, dirs_exist_ok=True)
    path = stacks.DIT.checkpoint / stacks.DIT.flow
    teacher, speakers = load_dit_flow(args.models / path), speak(args.models)
    export(distil(teacher, speakers, args.output / "student.pt", args.seconds), args.output / path)


if __name__ == "__main__":
    main()
