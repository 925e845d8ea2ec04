"""The stacks: what differs between them, as data. Everything else is the same code.

A stack is one orchestrator model, one token2wav model and one official checkpoint. To add one, add it to `BUILT_IN`, or
`register` it from outside; CONTRIBUTING.md has the steps. Each model.py names its stack, so that the processes that
tritonserver starts need no registration.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS, SAMPLE_RATE, SPECIAL_SPEECH_IDS, SPEECH_VOCAB, SYSTEM_WORDS
from cosyvoice_triton.replicas import first_replica

SHARED_TEMPLATES = "model_repo"  # templates of the models that all stacks have; also the unet stack's own


@dataclass(frozen=True, kw_only=True)
class TokenizerRules:
    """The control tokens that an LLM adds to its text vocabulary, by name; their ids are read from its tokenizer.

    sos, task: before the text of a prompt, and between the text and the speech tokens. ends: end an utterance; training
    uses the first. end_of_prompt: separates an instruction from the text to be spoken. system: words before every
    instruction, which every prompt then has; such an LLM takes an instruction and a transcript together. after_speech:
    all but `end_of_prompt`, in the order of their ids, which follow those of the speech tokens.
    """

    sos: str = "<|sos|>"
    task: str = "<|task_id|>"
    ends: tuple[str, ...] = ("<|eos1|>", "<|eos2|>", "<|eos3|>")
    end_of_prompt: str = "<|endofprompt|>"
    system: str = ""
    after_speech: tuple[str, ...] = ("<|eos1|>", "<|eos2|>", "<|eos3|>", "<|sos|>", "<|task_id|>")


COSYVOICE2_TOKENS = TokenizerRules()
_NAMED = ("<|sos|>", "<|eos1|>", "<|task_id|>", "<|fill|>")
_UNUSED = tuple(f"<|s_{SPEECH_VOCAB + number}|>" for number in range(len(_NAMED), SPECIAL_SPEECH_IDS))
COSYVOICE3_TOKENS = TokenizerRules(
    ends=("<|eos1|>", "<|sos|>", "<|task_id|>", "<|fill|>", *_UNUSED),
    system=SYSTEM_WORDS,
    after_speech=(*_NAMED, *_UNUSED),
)


@dataclass(frozen=True, kw_only=True)
class SpeechLLM:
    """The LLM of one or more stacks. All paths are below the directory with all checkpoints.

    repository: the HuggingFace repository of the official files; it is downloaded to `download`. modelscope: the same
        on ModelScope, "" if it is not there.
    weights, base: the official state dict, and the folder of the text model that it extends.
    reinforced: weights that were trained further by reinforcement learning, "" if there are none.
    directory: the same as a HuggingFace model directory, with the tokenizer, from which the ids of its tokens are read.
    genai, engine: what onnxruntime-genai and TensorRT-LLM load, both made from `directory`.
    tokenizer: its control tokens.
    """

    repository: str
    modelscope: str = ""
    download: str
    weights: str = "llm.pt"
    reinforced: str = ""
    base: str = "CosyVoice-BlankEN"
    directory: str
    genai: str
    engine: str
    tokenizer: TokenizerRules = COSYVOICE2_TOKENS


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One way from text to speech.

    name: what `--stack` takes. summary: one line for `--help`.
    orchestrator, token2wav: names of the two Triton models of its own.
    templates: folder with their templates, relative to the checkout or absolute. Where it also has a template of a
        model that the stacks share, that one is used instead of the one in SHARED_TEMPLATES.
    llm: its LLM.
    repository: the HuggingFace repository of the other official files, which are in its folder `repository_folder`; it
        is downloaded to `download`, a folder below the directory with all checkpoints. modelscope: as in `SpeechLLM`.
    flow, hift, speaker_encoder, speech_tokenizer: these files.
    flow_tensors: prefix of tensor names that distinguish its `flow` from other stacks' files.
    flow_config: "module:class" of the flow's sizes, whose `from_shapes` reads them from those tensors.
    mel_max_hz: upper limit of the filters of the flow's mel, Hz.
    networks: what of the flow can run outside torch: the use in serving (see cosyvoice_triton.runtimes.signatures)
    -> ONNX file.
    cumulative: a chunk is sent with all tokens of its stream so far and its `token_offset`, because the flow computes
        some of them again; otherwise with its new tokens only.
    chunk_boundary: chunks end on multiples of it, counted from the prompt's first token. 1: anywhere.
    loader, vocoder_loader: "module:function" that load the flow and the vocoder in their streaming forms; imported by
        token2wav only.
    vocoder_stream_bytes, vocoder_noise_bytes: what the vocoder keeps of a stream at its official sizes, and of the
        noise of its source.
    settings: defaults of template keys, such as sampling, that differ from those of `cosyvoice_triton.config`.
    silent_tokens: the speech tokens of silence, of which long runs are shortened, see orchestrator/token_buffer.py.
    speakers: where upstream's scripts get their spk2info.pt, "" if they have none for this stack. A branch of a third
        party, so there is no checksum.
    upstream: what upstream's deployment of the stack takes for granted about its LLM: defaults of template keys for
        its commands, which fill in single templates.
    """

    name: str
    summary: str
    orchestrator: str
    token2wav: str
    templates: str
    llm: SpeechLLM
    repository: str
    modelscope: str = ""
    repository_folder: str = ""
    download: str
    flow: str = "flow.pt"
    hift: str = "hift.pt"
    speaker_encoder: str = "campplus.onnx"
    speech_tokenizer: str
    flow_tensors: str
    flow_config: str
    mel_max_hz: float = 8000.0
    networks: Mapping[str, str] = field(default_factory=dict, hash=False)
    cumulative: bool
    chunk_boundary: int
    loader: str
    vocoder_loader: str = "cosyvoice_triton.token2wav.vocoder.hift_vocoder:load"
    vocoder_stream_bytes: int = 20_000
    vocoder_noise_bytes: int = 9 << 20
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    silent_tokens: frozenset[int] = frozenset()
    speakers: str = ""
    upstream: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def models(self) -> tuple[str, str]:
        """Return the Triton models of its own."""
        return self.token2wav, self.orchestrator

    @property
    def checkpoint(self) -> PurePosixPath:
        """Return the folder of `files`, below the directory with all checkpoints."""
        return PurePosixPath(self.download, self.repository_folder)

    @property
    def files(self) -> tuple[str, ...]:
        """Return the official files that serving needs, apart from the LLM's."""
        return self.flow, self.hift, self.speaker_encoder, self.speech_tokenizer


COSYVOICE2_LLM = SpeechLLM(
    repository="FunAudioLLM/CosyVoice2-0.5B",
    modelscope="iic/CosyVoice2-0.5B",
    download="CosyVoice2-0.5B",
    directory="cosyvoice2_llm",
    genai="cosyvoice2_llm_genai",
    engine="trt_engines_bfloat16",  # upstream's name, which is also the model's name at trtllm-serve
)
DIT = Stack(
    name="dit",
    summary="Step-Audio2's DiT flow",
    orchestrator="cosyvoice2_dit",
    token2wav="token2wav_dit",
    templates="model_repo_dit",
    llm=COSYVOICE2_LLM,
    repository="stepfun-ai/Step-Audio-2-mini",
    modelscope="stepfun-ai/Step-Audio-2-mini",
    repository_folder="token2wav",
    download="Step-Audio-2-mini",
    speech_tokenizer="speech_tokenizer_v2_25hz.onnx",
    flow_tensors="decoder.estimator.blocks.",
    flow_config="cosyvoice_triton.networks.flow.config:DiTFlowConfig",
    networks={
        "whole": "flow.decoder.estimator.fp32.dynamic_batch.onnx",
        "prompt": "flow.decoder.estimator.chunk.fp32.dynamic_batch.simplify.onnx",
        "chunk": "flow.decoder.estimator.chunk.fp32.dynamic_batch.simplify.onnx",
    },
    cumulative=False,
    chunk_boundary=1,
    loader="cosyvoice_triton.token2wav.flow.dit_flow:load",
    # Of CosyVoice2: the encoders of a recording are the same files in both repositories.
    speakers="https://raw.githubusercontent.com/qi-hua/async_cosyvoice/main/CosyVoice2-0.5B/spk2info.pt",
    # trtllm-serve at its default port, which names the model after the engine's directory.
    upstream={"llm_transport": "openai", "llm_urls": "http://localhost:8000/v1", "llm_model": COSYVOICE2_LLM.engine},
)
UNET = Stack(
    name="unet",
    summary="CosyVoice2's causal UNet flow",
    orchestrator="cosyvoice2",
    token2wav="token2wav",
    templates=SHARED_TEMPLATES,
    llm=COSYVOICE2_LLM,
    repository="FunAudioLLM/CosyVoice2-0.5B",
    modelscope="iic/CosyVoice2-0.5B",
    download="CosyVoice2-0.5B",
    speech_tokenizer="speech_tokenizer_v2.onnx",
    flow_tensors="decoder.estimator.down_blocks.",
    flow_config="cosyvoice_triton.networks.flow.config:UNetFlowConfig",
    networks={
        "whole": "flow.decoder.estimator.fp32.onnx",
        # Upstream has no such file: its UNet sees the whole window, ours the chunks that a stream would have seen.
        "streaming": "flow.decoder.estimator.streaming.fp32.onnx",
    },
    cumulative=True,
    chunk_boundary=FLOW_CHUNK_TOKENS,
    loader="cosyvoice_triton.token2wav.flow.unet_flow:load",
    speakers=DIT.speakers,
    upstream={"llm_backend": "tensorrtllm"},
)
COSYVOICE3_LLM = SpeechLLM(
    repository="FunAudioLLM/Fun-CosyVoice3-0.5B-2512",
    modelscope="FunAudioLLM/Fun-CosyVoice3-0.5B-2512",
    download="Fun-CosyVoice3-0.5B-2512",
    reinforced="llm.rl.pt",
    directory="cosyvoice3_llm",
    genai="cosyvoice3_llm_genai",
    engine="cosyvoice3_trt_engines_bfloat16",
    tokenizer=COSYVOICE3_TOKENS,
)
COSYVOICE3 = Stack(
    name="cosyvoice3",
    summary="CosyVoice3's rotary DiT flow and causal HiFT",
    orchestrator="cosyvoice3",
    token2wav="token2wav_cosyvoice3",
    templates="model_repo_cosyvoice3",
    llm=COSYVOICE3_LLM,
    repository=COSYVOICE3_LLM.repository,
    modelscope=COSYVOICE3_LLM.modelscope,
    download=COSYVOICE3_LLM.download,
    speech_tokenizer="speech_tokenizer_v3.onnx",
    flow_tensors="decoder.estimator.transformer_blocks.",
    flow_config="cosyvoice_triton.networks.flow.config:CosyVoice3FlowConfig",
    mel_max_hz=SAMPLE_RATE / 2,
    cumulative=True,
    chunk_boundary=FLOW_CHUNK_TOKENS,
    loader="cosyvoice_triton.token2wav.flow.cosyvoice3_flow:load",
    vocoder_loader="cosyvoice_triton.token2wav.vocoder.causal_hift_vocoder:load",
    vocoder_stream_bytes=620_000,
    vocoder_noise_bytes=104 * 10**6,
    silent_tokens=frozenset((1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323)),  # upstream's, of S3 tokenizer v3
    settings={"max_streams": "16"},  # on 24 GB: a stream and a voice of 5 s take 0.6 GiB
    # As of DIT; the engine's directory has the same name there, because upstream keeps each LLM in a folder of its own.
    upstream={**DIT.upstream},
)
BUILT_IN = (DIT, UNET, COSYVOICE3)
DEFAULT = DIT  # of every command and client

_stacks: dict[str, Stack] = {stack.name: stack for stack in BUILT_IN}


def register(stack: Stack) -> None:
    """Add a stack. ValueError if its name or one of its models is another stack's."""
    new = {stack.name, *stack.models}
    for other in _stacks.values():
        if taken := new & {other.name, *other.models}:
            raise ValueError(f"stack {stack.name!r}: {', '.join(sorted(taken))} belongs to the stack {other.name!r}")
    _stacks[stack.name] = stack


def unregister(name: str) -> None:
    """Remove a stack that was registered."""
    del _stacks[name]


def registered() -> tuple[Stack, ...]:
    """Return all stacks, the built-in ones first."""
    return tuple(_stacks.values())


def names() -> tuple[str, ...]:
    """Return the names of all stacks: the choices of `--stack`."""
    return tuple(_stacks)


def named(name: str) -> Stack:
    """Return the stack of that name. ValueError lists those there are."""
    if name not in _stacks:
        raise ValueError(f"no stack {name!r}; there are {', '.join(_stacks)}")
    return _stacks[name]


def of_model(model: str) -> Stack:
    """Return the stack that a Triton model (orchestrator or token2wav) belongs to. ValueError lists those there are."""
    for stack in _stacks.values():
        if model in stack.models or first_replica(model) == stack.token2wav:
            return stack
    owned = [name for stack in _stacks.values() for name in stack.models]
    raise ValueError(f"no stack has the model {model!r}; there are {', '.join(owned)}")


def of_flow(tensors: Iterable[str], file: object) -> Stack:
    """Return the stack whose flow has tensors of these names. ValueError says that `file` is no stack's flow."""
    tensors = list(tensors)
    for stack in _stacks.values():
        if any(name.startswith(stack.flow_tensors) for name in tensors):
            return stack
    known = "; ".join(f"{stack.name}: {stack.summary}" for stack in _stacks.values())
    raise ValueError(f"checkpoint {file} is the flow of no stack ({known})")


def summaries() -> str:
    """Return all stacks in one line, for the help of `--stack`."""
    return "; ".join(
        f"{stack.name}{' (default)' if stack is DEFAULT else ''}: {stack.summary}" for stack in _stacks.values()
    )


def orchestrators() -> tuple[str, ...]:
    """Return the models that clients send requests to, the default first."""
    return tuple(stack.orchestrator for stack in _stacks.values())
