"""The requests of a soak, each determined by the seed and its number.

Voices: the registered ones of the demo checkpoint, and variants of some recordings, with and without a transcript.
A bad request is wrong in one way, and each way has the answer that it must get.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from cosyvoice_triton.client.requests import Parameters, Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.voice.audio import at_rate

Kind = Literal["good", "cancel", "bad"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CANCELLED, BAD = 0.10, 0.05  # shares of all requests
EARLY = 0.3  # share of the cancelled ones that are cancelled within a second, without waiting for audio
VOICES = ("slt", "rms")  # registered
VARIANTS = 12  # of each recording: voices that all caches hold once the servers are warm
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
WEIGHTS: Mapping[str, int] = {
    "grpc": 5,
    "grpc-offline": 2,
    "triton-http": 2,
    "speech": 4,
    "speech-sse": 2,
    "speech-batch": 1,
    "websocket": 3,
    "runtime-http": 2,
    "runtime-grpc": 2,
    "voices": 2,
    "hostile": 3,
}


@dataclass(frozen=True)
class BadInput:
    """What is wrong with a request, and its answer.

    change: values to replace, by names that the route knows. answer: pattern of the error's text, which begins with
    "HTTP STATUS" where there is one.
    """

    name: str
    change: Mapping[str, Any]
    answer: str


_TOO_LONG = "word " * 1000
_TRITON_BAD = (
    BadInput("empty text", {"target_text": "   "}, "target_text has nothing to speak"),
    BadInput("text too long", {"target_text": _TOO_LONG}, "target_text has .* characters"),
    BadInput(
        "unknown speaker", {"speaker": "nobody", "reference": None, "reference_text": None}, "unknown speaker 'nobody'"
    ),
    BadInput("recording too short", {"reference": np.full(400, 0.1, np.float32), "speaker": None}, "reference_wav"),
    BadInput(
        "recording not finite",
        {"reference": np.full(PROMPT_SAMPLE_RATE, np.nan, np.float32), "speaker": None},
        "finite",
    ),
    BadInput(
        "two voices", {"reference": np.full(PROMPT_SAMPLE_RATE, 0.1, np.float32), "speaker": "slt"}, "only one voice"
    ),
    BadInput("temperature is text", {"parameters": {"temperature": "hot"}}, "temperature must be a number"),
    BadInput("unknown sampling", {"parameters": {"sampling": "best"}}, "sampling"),
)
_SPEECH_BAD = (
    BadInput("empty text", {"input": " "}, "HTTP 400 .*input is empty"),
    BadInput("text too long", {"input": _TOO_LONG}, "HTTP 400 .*input has .* characters"),
    BadInput("unknown voice", {"voice": "nobody", "ref_audio": "", "ref_text": ""}, "HTTP 400 .*nobody"),
    BadInput("unknown field", {"voices": "slt"}, "HTTP 400 .*voices"),
    BadInput("unknown model", {"model": "another"}, "HTTP 404 .*another"),
    BadInput("unknown format", {"response_format": "midi"}, "HTTP 400 .*midi"),
    BadInput("speed out of range", {"speed": 9}, "HTTP 400 .*speed"),
    BadInput("recording is not base64", {"ref_audio": "%%%"}, "HTTP 400 .*ref_audio"),
    BadInput("recording is no sound file", {"ref_audio": "AAAA"}, "HTTP 400 .*ref_audio"),
    BadInput("seed of 65 bits", {"seed": 1 << 64}, "HTTP 400 .*seed"),
    BadInput("half a surrogate pair", {"input": "\ud800"}, "HTTP 400 .*input"),
)
BAD_INPUTS: Mapping[str, Sequence[BadInput]] = {
    "grpc": _TRITON_BAD,
    "grpc-offline": _TRITON_BAD,
    "triton-http": (*(BadInput(bad.name, bad.change, f"HTTP 400 .*{bad.answer}") for bad in _TRITON_BAD),),
    "speech": (*_SPEECH_BAD, BadInput("not JSON", {"body": "{"}, "HTTP 400 .*not JSON")),
    "speech-sse": _SPEECH_BAD,
    "speech-batch": (BadInput("no items", {"items": []}, "HTTP 400 .*items"),),
    "websocket": (
        BadInput("unknown message", {"message": {"type": "hello"}}, "message type 'hello' is unknown"),
        BadInput("no text", {"message": {"type": "input.text"}}, "input.text has no text"),
        BadInput("unknown field", {"message": {"type": "session.config", "voices": "slt"}}, "voices"),
    ),
    "runtime-http": (
        BadInput("no text", {"tts_text": ""}, "HTTP 400 .*tts_text is missing"),
        BadInput("unknown voice", {"spk_id": "nobody"}, "HTTP 400 .*nobody"),
    ),
    "runtime-grpc": (
        BadInput("no text", {"tts_text": ""}, "INVALID_ARGUMENT .*input is empty"),
        BadInput("unknown voice", {"spk_id": "nobody"}, "INVALID_ARGUMENT .*nobody"),
    ),
    "hostile": (BadInput("deep JSON", {"body": '{"input":' + "[" * 100_000}, "HTTP 400 .*(levels|besides letters)"),),
    "voices": (
        BadInput("name is a path", {"name": "../voice"}, "HTTP 400 .*not a valid name"),
        BadInput("name is taken", {"name": "slt"}, "HTTP 409 .*already exists"),
        BadInput("not a sound file", {"audio": b"RIFF" * 20}, "HTTP 400 .*audio_sample"),
    ),
}


@dataclass(frozen=True)
class SoakCase:
    """One request, or on the route "voices" the life of one voice.

    cancel_after: parts of the answer after which a request of kind "cancel" is cancelled; 0: after `pause` seconds.
    choice: random numbers for what only some routes choose, such as a format.
    """

    number: int
    route: str
    kind: Kind
    utterance: Utterance
    cancel_after: int
    pause: float
    choice: int
    bad: BadInput | None = None

    @property
    def what(self) -> str:
        """Describes the request in a few words."""
        if self.bad is not None:
            return f"bad: {self.bad.name}"
        voice = self.utterance.speaker or ("zero-shot" if self.utterance.reference_text else "cross-lingual")
        return f"{self.kind}: {voice}, {len(self.utterance.target_text)} characters"

    @property
    def barge_in(self) -> bool:
        """Whether it is cancelled by a message, after which its session goes on, instead of being broken off."""
        return self.route == "websocket" and self.kind == "cancel" and self.choice % 2 == 1

    @property
    def seed(self) -> int:
        return int(self.utterance.parameters["seed"])


@dataclass(frozen=True)
class SoakPlan:
    """All cases. routes: those that the server has. samples: texts and recordings."""

    seed: int
    routes: Sequence[str]
    samples: Sequence[Sample]

    def case(self, number: int) -> SoakCase:
        random = np.random.default_rng((self.seed, number))
        weights = np.array([WEIGHTS[route] for route in self.routes], float)
        route = str(random.choice(self.routes, p=weights / weights.sum()))
        kind = KINDS[int(random.choice(len(KINDS), p=[1 - CANCELLED - BAD, CANCELLED, BAD]))]
        ways = BAD_INPUTS[route]
        return SoakCase(
            number=number,
            route=route,
            kind=kind,
            utterance=self._utterance(random),
            cancel_after=0 if random.random() < EARLY else int(random.integers(1, 3)),
            pause=float(random.uniform(0, 1)),
            choice=int(random.integers(0, 1 << 16)),
            bad=ways[int(random.integers(len(ways)))] if kind == "bad" else None,
        )

    def _utterance(self, random: np.random.Generator) -> Utterance:
        sample = self.samples[int(random.integers(len(self.samples)))]
        parameters: Parameters = {"seed": int(random.integers(1 << 31))}
        if random.random() < 0.6:
            return Utterance(sample.target_text, speaker=str(random.choice(VOICES)), parameters=parameters)
        transcript = sample.prompt_text if random.random() < 0.7 else None
        assert sample.prompt_audio is not None
        recording = at_rate(sample.prompt_audio, PROMPT_SAMPLE_RATE).copy()
        recording[0] += 1e-3 * random.integers(VARIANTS)  # inaudible, but another recording for any cache
        return Utterance(sample.target_text, recording, transcript, parameters)
