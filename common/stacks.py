"""The stacks: what differs between them, as data. Everything else is the same code.

A stack is one orchestrator model, one token2wav model and one official checkpoint. To add one, add it to `BUILT_IN`, or
`register` it from outside; CONTRIBUTING.md has the steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from common.constants import FLOW_CHUNK_TOKENS


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One way from text to speech.

    name: what `--stack` takes. summary: one line for `--help`.
    orchestrator, token2wav: names of the two Triton models of its own.
    templates: folder with their templates, relative to the checkout or absolute.
    checkpoint: folder of the official files below the directory with all checkpoints; `flow`, `hift`,
        `speech_tokenizer` and `speaker_encoder` are the files in it.
    repository: the HuggingFace repository that has them, and `repository_folder`, where they are in it.
    cumulative: a chunk is sent with all tokens of its stream so far and its `token_offset` (a flow that computes its
        window again); otherwise with its new tokens alone (a flow that keeps caches).
    chunk_boundary: chunks end on its multiples, counted from the prompt's first token. 1: anywhere.
    loader: "module:function" that loads the flow and makes its streaming form; imported by token2wav only.
    settings: defaults of template keys that differ from those of `common.config`.
    """

    name: str
    summary: str
    orchestrator: str
    token2wav: str
    templates: str
    checkpoint: PurePosixPath
    speech_tokenizer: str
    repository: str
    repository_folder: str = ""
    cumulative: bool
    chunk_boundary: int
    loader: str
    flow: str = "flow.pt"
    hift: str = "hift.pt"
    speaker_encoder: str = "campplus.onnx"
    settings: Mapping[str, str] = field(default_factory=dict)


DIT = Stack(
    name="dit",
    summary="Step-Audio2's DiT flow",
    orchestrator="cosyvoice2_dit",
    token2wav="token2wav_dit",
    templates="model_repo_dit",
    checkpoint=PurePosixPath("Step-Audio-2-mini/token2wav"),
    speech_tokenizer="speech_tokenizer_v2_25hz.onnx",
    repository="stepfun-ai/Step-Audio-2-mini",
    repository_folder="token2wav",
    cumulative=False,
    chunk_boundary=1,
    loader="common.token2wav.dit.streaming:load",
)
UNET = Stack(
    name="unet",
    summary="CosyVoice2's causal UNet flow",
    orchestrator="cosyvoice2",
    token2wav="token2wav",
    templates="model_repo",
    checkpoint=PurePosixPath("CosyVoice2-0.5B"),
    speech_tokenizer="speech_tokenizer_v2.onnx",
    repository="FunAudioLLM/CosyVoice2-0.5B",
    cumulative=True,
    chunk_boundary=FLOW_CHUNK_TOKENS,
    loader="common.token2wav.unet.streaming:load",
)
BUILT_IN = (DIT, UNET)  # the first is the default of every command

_stacks: dict[str, Stack] = {stack.name: stack for stack in BUILT_IN}


def register(stack: Stack) -> None:
    """Add a stack. ValueError if its name or one of its models is another stack's."""
    for other in _stacks.values():
        if taken := {stack.name, stack.orchestrator, stack.token2wav} & {
            other.name,
            other.orchestrator,
            other.token2wav,
        }:
            raise ValueError(f"stack {stack.name!r}: {', '.join(sorted(taken))} belongs to the stack {other.name!r}")
    _stacks[stack.name] = stack


def unregister(name: str) -> None:
    """Remove a stack that was registered."""
    del _stacks[name]


def names() -> tuple[str, ...]:
    """The names of all stacks, the default first."""
    return tuple(_stacks)


def named(name: str) -> Stack:
    """The stack of that name. ValueError lists those there are."""
    if name not in _stacks:
        raise ValueError(f"no stack {name!r}; there are {', '.join(_stacks)}")
    return _stacks[name]


def of_model(model: str) -> Stack:
    """The stack that a Triton model (orchestrator or token2wav) belongs to. ValueError lists those there are."""
    for stack in _stacks.values():
        if model in (stack.orchestrator, stack.token2wav):
            return stack
    owned = [name for stack in _stacks.values() for name in (stack.orchestrator, stack.token2wav)]
    raise ValueError(f"no stack has the model {model!r}; there are {', '.join(owned)}")
