"""The requests of a soak, each determined by the seed and its number.

Voices: the registered ones of the demo checkpoint, and variants of some recordings, with and without a transcript.
A bad request is wrong in one way, and each way has the answer that it must get.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cosyvoice_triton.client.utterance import Parameters, Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.load.plan import LoadJob
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.voice.audio import at_rate

CANCELLED, BAD = 0.10, 0.05  # shares of all requests
EARLY = 0.3  # share of the cancelled ones that are cancelled within a second, without waiting for audio
VOICES = ("nezumi", "kumo")  # registered
VARIANTS = 12  # of each recording: voices that all caches hold once the servers are warm
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
WEIGHTS: Mapping[str, int] = {
    "grpc": 5,
    "grpc-offline": 3,
    "speech": 6,
    "websocket": 3,
    "barge-in": 1,
    "runtime-grpc": 3,
    "voices": 2,
    "gateway": 2,
}


class BadInput(NamedTuple):
    """What is wrong with a request: fields of its utterance to replace; and the pattern of its answer, which has
    "HTTP STATUS" where there is one."""

    name: str
    change: Mapping[str, Any]
    answer: str


class Unchecked(Utterance):
    """An utterance whose values no client would send."""

    def __post_init__(self) -> None:
        pass


_NOBODY = {"speaker": "nobody", "reference": None, "reference_text": None}
_SECOND = np.full(PROMPT_SAMPLE_RATE, 0.1, np.float32)
_TRITON_BAD = (
    BadInput("text too long", {"target_text": "word " * 1000}, "target_text has .* characters"),
    BadInput("unknown speaker", _NOBODY, "unknown speaker 'nobody'"),
    BadInput("recording not finite", {"reference": np.nan * _SECOND, "speaker": None}, "finite"),
    BadInput("temperature is text", {"parameters": {"temperature": "hot"}}, "temperature must be a number"),
)
_SOCKET_BAD = (BadInput("unknown message", {"parameters": {"type": "hello"}}, "message type 'hello' is unknown"),)
BAD_INPUTS: Mapping[str, Sequence[BadInput]] = {
    "grpc": _TRITON_BAD,
    "grpc-offline": _TRITON_BAD,
    "speech": (
        BadInput("text too long", {"target_text": "word " * 1000}, "HTTP 400.*input has .* characters"),
        BadInput("unknown voice", _NOBODY, "HTTP 400.*nobody"),
        BadInput("unknown model", {"parameters": {"model": "another"}}, "HTTP 404.*another"),
        BadInput("recording is no sound file", {"parameters": {"ref_audio": "AAAA"}}, "HTTP 400.*not a readable"),
    ),
    "websocket": _SOCKET_BAD,
    "barge-in": _SOCKET_BAD,
    "runtime-grpc": (BadInput("unknown voice", _NOBODY, "INVALID_ARGUMENT .*nobody"),),
    "voices": (
        BadInput("name is a path", {"speaker": "../voice"}, "HTTP 400.*not a valid name"),
        BadInput("name is taken", {"speaker": "nezumi"}, "HTTP 409.*already exists"),
        BadInput("no recording", {"reference": _SECOND[:0]}, "HTTP 400.*the recording is empty"),
    ),
}


@dataclass(frozen=True)
class SoakPlan(Sequence[LoadJob]):
    """All requests, endless. routes: those that the server has. samples: texts and recordings."""

    seed: int
    routes: Sequence[str]
    samples: Sequence[Sample]

    def __len__(self) -> int:
        return 1 << 31

    def __getitem__(self, number: Any) -> Any:
        random = np.random.default_rng((self.seed, number))
        weights = np.array([WEIGHTS[route] for route in self.routes], float)
        route = str(random.choice(self.routes, p=weights / weights.sum()))
        cancelled, bad = np.cumsum([CANCELLED, BAD]) > random.random()
        said = self._utterance(random, route, f"soak-{number}")
        if bad and not cancelled and (ways := BAD_INPUTS.get(route)):
            way = ways[int(random.integers(len(ways)))]
            said = Unchecked(**{**vars(said), **way.change})
            return LoadJob(f"{number}. bad: {way.name}", said, door=route, expected=way.answer)
        voice = said.speaker or ("zero-shot" if said.reference_text else "cross-lingual")
        what = f"{number}. {'cancelled: ' if cancelled else ''}{voice}, {len(said.target_text)} characters"
        if not cancelled:
            return LoadJob(what, said, door=route)
        if random.random() < EARLY:
            return LoadJob(what, said, door=route, cancel_after=float(random.uniform(0, 1)))
        return LoadJob(what, said, door=route, cancel_after_parts=int(random.integers(1, 3)))

    def _utterance(self, random: np.random.Generator, route: str, name: str) -> Utterance:
        sample = self.samples[int(random.integers(len(self.samples)))]
        parameters: Parameters = {"seed": int(random.integers(1 << 31))}
        if route in ("speech", "gateway"):
            parameters["response_format"] = str(random.choice(FORMATS))
        if random.random() < 0.6 and route != "voices":
            return Utterance(sample.target_text, speaker=str(random.choice(VOICES)), parameters=parameters)
        transcript = sample.prompt_text if random.random() < 0.7 else None
        assert sample.prompt_audio is not None
        recording = at_rate(sample.prompt_audio, PROMPT_SAMPLE_RATE).copy()
        recording[0] += 1e-3 * random.integers(VARIANTS)  # inaudible, but another recording for any cache
        new = name if route == "voices" else None  # which the recording is registered as
        return Utterance(sample.target_text, recording, transcript, parameters, new)
