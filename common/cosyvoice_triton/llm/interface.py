"""What all clients and engines of the LLM share: the prompt, the sampling and the stream of speech tokens."""

import dataclasses
import math
import random
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from cosyvoice_triton.config import SAMPLING_PRESETS, HopConfig, OrchestratorConfig
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, MAX_STREAM_TOKENS
from cosyvoice_triton.text.segments import expected_seconds

MAX_INT32 = 2**31 - 1  # the type of integers in the LLM's tensors
MAX_SEED = MAX_INT32  # the smallest maximum seed among the engines
URGENT_TOKENS = HopConfig.first_hop_tokens + LOOKAHEAD_TOKENS  # what the first chunk of audio usually needs
MAX_RAS_WINDOW = 64  # tokens of each request that the sampler on a GPU remembers

TEXT_TOKENS_PER_SECOND = 2.5

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class LLMPrompt:
    """One utterance to speak. `prompt_tokens` are speech ids 0..6560 of the reference, `prompt_text` its transcript.

    `instruction`: how to speak; CosyVoice2 follows one only without the other two. Cross-lingual mode leaves all three
    empty: the LLM then gets only the text. `generated`: speech ids of this utterance that the LLM has made already and
    is to continue. `ids`: the whole prompt as ids of the LLM, in place of the template, see `interleaving`; then the
    texts and `generated` only bound the length of the answer.

    Hints for the order of work: `urgent_tokens`, how many of the answer's tokens a listener waits for who has no audio
    yet; `silent_tokens`, speech ids of which those at its start are not spoken, but the last ONSET_TOKENS; `played`,
    whether a listener hears the speech while it is made, and so needs TOKEN_RATE of them a second.
    """

    target_text: str
    prompt_text: str = ""
    prompt_tokens: Sequence[int] = field(default=(), repr=False)
    instruction: str = ""
    generated: Sequence[int] = field(default=(), repr=False)
    ids: Sequence[int] = field(default=(), repr=False)
    urgent_tokens: int = field(default=URGENT_TOKENS, compare=False)
    silent_tokens: Collection[int] = field(default=(), compare=False, repr=False)
    played: bool = field(default=False, compare=False)

    @property
    def speech_tokens(self) -> list[int]:
        """Return all speech ids 0..6560 that the LLM continues."""
        return [*self.prompt_tokens, *self.generated]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of one request. The defaults are the preset `triton`, which every engine can run.

    temperature 0 is greedy, top_k 0 is unlimited, seed None chooses one at random. max_tokens is limited by what
    token2wav can render; no end token is sampled before min_tokens others. ras_window 0 disables repetition-aware
    sampling (RAS): with it, a sampled token that makes up ras_tau or more of the last ras_window tokens is replaced by
    one sampled from all other tokens. Raises ValueError naming the value that is out of range.

    RAS is VALL-E 2's (arXiv:2406.05370) as in upstream's `ras_sampling`, which excludes the repeated token.
    """

    temperature: float = SAMPLING_PRESETS["triton"].temperature
    top_p: float = SAMPLING_PRESETS["triton"].top_p
    top_k: int = SAMPLING_PRESETS["triton"].top_k
    repetition_penalty: float = SAMPLING_PRESETS["triton"].repetition_penalty
    max_tokens: int = OrchestratorConfig.max_tokens
    min_tokens: int = 0
    ras_window: int = SAMPLING_PRESETS["triton"].ras_window
    ras_tau: float = SAMPLING_PRESETS["triton"].ras_tau
    seed: int | None = None

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (0 <= self.temperature <= 10, "0..10"),
            "top_p": (0 < self.top_p <= 1, "above 0, up to 1"),
            "top_k": (0 <= self.top_k <= MAX_INT32, f"0..{MAX_INT32}"),
            "repetition_penalty": (0 < self.repetition_penalty <= 10, "above 0, up to 10"),
            "max_tokens": (1 <= self.max_tokens <= MAX_STREAM_TOKENS, f"1..{MAX_STREAM_TOKENS}"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"0..{self.max_tokens}"),
            "ras_window": (0 <= self.ras_window <= MAX_RAS_WINDOW, f"0..{MAX_RAS_WINDOW}"),
            "ras_tau": (0 < self.ras_tau <= 1, "above 0, up to 1"),
            "seed": (self.seed is None or 0 <= self.seed <= MAX_SEED, f"0..{MAX_SEED}"),
        }
        for name, (good, range_) in allowed.items():
            if not good:
                raise ValueError(f"{name} {getattr(self, name)!r} is out of range: {range_}")

    @property
    def ras_limit(self) -> int:
        """Return how often a token occurs among the last ras_window tokens if it is replaced."""
        return max(1, math.ceil(self.ras_window * self.ras_tau))

    @property
    def repeatable(self) -> bool:
        """Return whether the same prompt gives the same tokens again."""
        return self.seed is not None or self.temperature == 0

    def seeded(self) -> "Sampling":
        """Return it with a random seed if it has none: for runtimes that otherwise give every request the same one."""
        return self if self.seed is not None else dataclasses.replace(self, seed=random.randrange(MAX_SEED))


def preset_values(name: str) -> dict[str, Any]:
    """Return the values of the preset `name` by their names in `Sampling`. ValueError for an unknown one."""
    for known, preset in SAMPLING_PRESETS.items():
        if name == known:
            return preset._asdict()
    raise ValueError(f"sampling {name!r} is not a preset; there are {', '.join(SAMPLING_PRESETS)}")


@dataclass(frozen=True, kw_only=True)
class LengthRatios:
    """Minimum and maximum of speech tokens per token of the target text; the defaults are CosyVoice2's.

    A text counts as at least TEXT_TOKENS_PER_SECOND of its expected duration: "ありがとうございます" is one token,
    whose speech 20 tokens do not hold. At the default maximum this is twice the expected duration.
    """

    min: float = OrchestratorConfig.min_token_ratio
    max: float = OrchestratorConfig.max_token_ratio

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max < math.inf or self.max == 0:
            raise ValueError(f"token ratios must be numbers with 0 <= min <= max, not {self.min!r} and {self.max!r}")

    def bound(self, sampling: Sampling, prompt: LLMPrompt, text_tokens: int) -> Sampling:
        """Return `sampling` with its length limits narrowed to the ratios, less what is generated already.

        text_tokens: number of LLM tokens in the target text. Never above the request's own max_tokens, and never 0.
        """
        size = max(text_tokens, TEXT_TOKENS_PER_SECOND * expected_seconds(prompt.target_text))
        done = len(prompt.generated)
        upper = max(1, min(sampling.max_tokens, int(self.max * size) - done))
        lower = min(upper, max(sampling.min_tokens, int(self.min * size) - done))
        return dataclasses.replace(sampling, min_tokens=lower, max_tokens=upper)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Maximum waits in seconds, below 5 so that a dead or silent LLM is an error within that time.

    first_token is measured from the request and includes connecting; token is the wait between later tokens.
    """

    connect: float = 2.0
    first_token: float = OrchestratorConfig.token_timeout
    token: float = OrchestratorConfig.token_timeout

    def __post_init__(self) -> None:
        for name in ("connect", "first_token", "token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"timeout {name} must be a positive number of seconds: {value!r}")


class TokenChunk(NamedTuple):
    """Speech ids 0..6560 as they arrived, possibly none, and in the final chunk the reason of the end: "stop", or
    "length" if `max_tokens` cut the speech short."""

    tokens: list[int]
    finish_reason: FinishReason | None = None


class SpeechLM(Protocol):
    """Generates speech tokens: a client of an LLM server or an engine in this process."""

    def generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        """Yield the speech tokens of `prompt` as they arrive. The first iteration sends the request; closing the
        generator cancels it at the LLM if it still runs.

        Raises UnavailableError if the LLM is down, silent or stops midway, and ValueError if it rejects the request.
        """
        ...

    async def aclose(self) -> None:
        """Release connections; streams that are still open end with UnavailableError."""
        ...
