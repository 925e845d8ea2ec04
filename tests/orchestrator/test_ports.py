import asyncio
import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import MEL_BINS, SPEAKER_DIM
from cosyvoice_triton.errors import LostAnswerError, ModelDownError, OverloadedError, UnavailableError
from cosyvoice_triton.orchestrator.chunking import Hop
from cosyvoice_triton.orchestrator.token2wav_port import Token2WavReplicas, Token2WavSequence, send_over_triton
from cosyvoice_triton.orchestrator.triton_encoder import TritonPromptEncoder
from cosyvoice_triton.voice.prompt import Prompt, Recording

from tests.support.pipeline import settle

FIRST_SPEECH_ID = 1000
PROMPT = Prompt(
    tokens=np.array([7, 8]),
    mel=np.full((4, MEL_BINS), 0.5, np.float32),
    embedding=np.full(SPEAKER_DIM, 0.25, np.float32),
    text="",
)


@dataclass(frozen=True)
class Sent:
    model: str
    inputs: Mapping[str, np.ndarray]
    correlation_id: int = 0
    start: bool = False
    end: bool = False

    def __getitem__(self, name: str) -> Any:
        """An input without its batch dimension, as plain Python."""
        assert self.inputs[name].shape[0] == 1
        return self.inputs[name][0].tolist()


@dataclass
class FakeCall:
    """Answers every request with `answers`; request number n raises `failing[n]` if there is one."""

    answers: dict[str, np.ndarray] = field(default_factory=lambda: {"waveform": np.ones((1, 3), np.float32)})
    failing: dict[int, Exception] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    sent: list[Sent] = field(default_factory=list)
    answered: int = 0

    async def __call__(
        self, model: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str], **sequence: Any
    ) -> dict[str, np.ndarray]:
        number = len(self.sent)
        self.sent.append(Sent(model, inputs, **sequence))
        if self.gate is not None:
            await self.gate.wait()
        self.answered += 1
        if number in self.failing:
            raise self.failing[number]
        return {name: self.answers[name] for name in outputs}


def token2wav(
    call: Any, models: Sequence[str] = ("token2wav",), *, cumulative: bool = False, failed: Any = lambda model: False
) -> Token2WavReplicas:
    sends = {model: send_over_triton(call, model, FIRST_SPEECH_ID) for model in models}
    return Token2WavReplicas(sends, cumulative=cumulative, failed=failed)


async def two_chunks(stream: Token2WavSequence) -> None:
    """An utterance of 13 tokens: 6, then 7. The LLM is further ahead than the look-ahead of the first chunk."""
    await stream.start(PROMPT, None)
    await stream.render(list(range(12)), Hop(0, 6, final=False))
    await stream.render(list(range(13)), Hop(6, 7, final=True))
    await stream.abort()


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize(
    ("cumulative", "last", "offsets"), [(True, range(13), [[0], [0], [6]]), (False, range(6, 13), [None] * 3)]
)
async def test_a_stream_is_one_sequence_of_chunks_with_their_look_ahead(reserved, cumulative, last, offsets) -> None:
    """The UNet's model gets all tokens so far and the offset, that of the DiT the new ones. A new listener has a place
    before the voice is known."""
    call = FakeCall()
    stream = token2wav(call, cumulative=cumulative).open()
    if reserved:
        await stream.reserve()
    await two_chunks(stream)
    if reserved:
        place = call.sent.pop(0)
        assert place.start and place["target_speech_tokens"] == [] and "prompt_speech_tokens" not in place.inputs
        assert place.correlation_id == call.sent[0].correlation_id
    assert [(sent.start, sent.end, sent["finalize"], "prompt_speech_tokens" in sent.inputs) for sent in call.sent] == [
        (not reserved, False, [False], True),
        (False, False, [False], False),
        (False, True, [True], False),
    ]
    assert len({sent.correlation_id for sent in call.sent}) == 1
    tokens = [[token - FIRST_SPEECH_ID for token in sent["target_speech_tokens"]] for sent in call.sent]
    assert tokens == [[], list(range(9)), list(last)]
    assert [sent["token_offset"] if "token_offset" in sent.inputs else None for sent in call.sent] == offsets


def test_a_later_segment_tells_token2wav_how_much_audio_its_listener_has_left() -> None:
    """By the id of the segment before, which proves that there is one."""
    call = FakeCall()
    stream = token2wav(call, cumulative=False).open()
    asyncio.run(two_chunks(stream))
    asyncio.run(stream.following().start(PROMPT, 1.5))
    last = call.sent[-1]
    assert last["audio_left"] == [1.5] and last.inputs["audio_left"].dtype == np.float32
    assert last.start and last.correlation_id == call.sent[0].correlation_id


def test_prompt_tensors_have_the_types_and_shapes_of_the_contract() -> None:
    call = FakeCall()
    asyncio.run(token2wav(call, cumulative=True).open().start(PROMPT, None))
    assert {name: (value.dtype.name, value.shape) for name, value in call.sent[0].inputs.items()} == {
        "target_speech_tokens": ("int32", (1, 0)),
        "token_offset": ("int32", (1, 1)),
        "finalize": ("bool", (1, 1)),
        "prompt_speech_tokens": ("int32", (1, 2)),
        "prompt_speech_feat": ("float16", (1, 4, MEL_BINS)),
        "prompt_spk_embedding": ("float16", (1, SPEAKER_DIM)),
    }
    assert call.sent[0]["prompt_speech_tokens"] == [FIRST_SPEECH_ID + 7, FIRST_SPEECH_ID + 8]


def test_offline_is_one_request_that_starts_and_ends_a_sequence() -> None:
    call = FakeCall()
    audio = asyncio.run(token2wav(call, cumulative=True).offline(PROMPT, [1, 2], speed=1.25))
    assert audio.shape == (3,)
    (sent,) = call.sent
    assert sent.start and sent.end and sent["target_speech_tokens"] == [FIRST_SPEECH_ID + 1, FIRST_SPEECH_ID + 2]
    assert "token_offset" not in sent.inputs and "finalize" not in sent.inputs
    assert sent["speed"] == [1.25]


OUT_OF_MEMORY = RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("failing", "ends"),
    [
        ({0: OUT_OF_MEMORY}, [False, True]),
        ({1: OUT_OF_MEMORY}, [False, False, True]),
        ({2: OUT_OF_MEMORY}, [False, False, True]),
        ({0: OUT_OF_MEMORY, 1: ValueError("not live")}, [False, True]),
    ],
    ids=["voice", "chunk", "final chunk", "abort"],
)
async def test_a_stream_whose_request_failed_is_ended_once_and_a_failing_end_is_logged(failing, ends, caplog) -> None:
    call = FakeCall(failing=failing)
    stream = token2wav(call, cumulative=False).open()
    await stream.abort()  # it has never started
    with pytest.raises(RuntimeError, match="out of memory"):
        await two_chunks(stream)
    await stream.abort()
    await stream.abort()
    assert [sent.end for sent in call.sent] == ends
    assert call.sent[-1]["target_speech_tokens"] == [] or 2 in failing
    assert ("not live" in caplog.text) == (len(failing) == 2)


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves meanwhile"])
async def test_an_abort_waits_for_the_start_in_flight_also_without_its_client(leaves: bool) -> None:
    call = FakeCall(gate=asyncio.Event())
    models = token2wav(call, cumulative=False)
    stream = models.open()
    starting = asyncio.create_task(stream.start(PROMPT, None))
    await settle()
    starting.cancel()
    aborting = asyncio.create_task(stream.abort())
    await settle()
    assert [sent.end for sent in call.sent] == [False]
    if leaves:
        aborting.cancel()
        await asyncio.wait({aborting})
    assert call.gate is not None
    call.gate.set()
    await settle()
    assert [sent.end for sent in call.sent] == [False, True] and call.answered == 2
    assert aborting.done() and not any(models.live.values())


@pytest.mark.parametrize("final", [False, True])
async def test_an_abort_is_sent_while_a_chunk_is_in_flight(final: bool) -> None:
    """So that the next listener is not refused the place until it is rendered."""
    call = FakeCall()
    stream = token2wav(call, cumulative=False).open()
    await stream.start(PROMPT, None)
    call.gate = asyncio.Event()
    rendering = asyncio.create_task(stream.render(list(range(12)), Hop(0, 6, final=final)))
    await settle()
    rendering.cancel()
    aborting = asyncio.create_task(stream.abort())
    await settle()
    assert [(sent.end, sent["finalize"]) for sent in call.sent[1:]] == [(final, [final]), (True, [False])]
    assert call.answered == 1
    call.gate.set()
    await aborting
    await stream.abort()
    assert call.answered == len(call.sent) == 3


WAV = np.linspace(-0.5, 0.5, 16_000, dtype=np.float32)


def test_the_parts_of_a_prompt_come_from_the_whole_reference_and_the_mel_from_no_model() -> None:
    ids = np.array([[FIRST_SPEECH_ID, FIRST_SPEECH_ID + 5]], np.int32)
    x_vector = np.ones((1, SPEAKER_DIM), np.float16)
    call = FakeCall(answers={"prompt_speech_tokens": ids, "prompt_spk_embedding": x_vector})
    encoder = TritonPromptEncoder(call, FIRST_SPEECH_ID, 8000.0)
    tokens = asyncio.run(encoder.tokens(Recording(WAV)))
    assert tokens.tolist() == [0, 5] and tokens.dtype == np.int64
    assert asyncio.run(encoder.embedding(Recording(WAV))).shape == (SPEAKER_DIM,)
    mel = asyncio.run(encoder.mel(Recording(WAV)))
    assert mel.shape == (50, MEL_BINS) and mel.dtype == np.float32
    assert [sent.model for sent in call.sent] == ["audio_tokenizer", "speaker_embedding"]
    for sent in call.sent:
        assert sent.inputs["reference_wav"].shape == (1, len(WAV)) and sent["reference_wav_len"] == [len(WAV)]


def test_a_failure_that_the_response_cache_kept_does_not_disable_a_voice() -> None:
    """Triton caches the error of a prompt model as an answer without outputs."""
    answers = {"prompt_spk_embedding": np.ones((1, SPEAKER_DIM), np.float16)}
    call = FakeCall(answers, failing={0: LostAnswerError("answered without prompt_spk_embedding")})
    recording = Recording(np.ones(100, np.float32))
    assert len(asyncio.run(TritonPromptEncoder(call, FIRST_SPEECH_ID, 8000.0).embedding(recording))) == SPEAKER_DIM
    assert [sent["reference_wav_len"] for sent in call.sent] == [[100], [100]]
    assert [sent.inputs["reference_wav"].shape for sent in call.sent] == [(1, 100), (1, 101)]


def two_models(call: FakeCall, failed: Collection[str] = ()) -> Token2WavReplicas:
    return token2wav(call, ["a", "a_1"], failed=failed.__contains__)


async def test_listeners_are_spread_over_the_models_and_keep_theirs() -> None:
    call = FakeCall()
    models = two_models(call)
    streams = [models.open() for _ in range(3)]
    for stream in streams:
        await stream.reserve()
    assert [stream.model for stream in streams] == ["a", "a_1", "a"] and models.live == {"a": 2, "a_1": 1}
    for stream in streams:
        await two_chunks(stream)
    assert models.live == {"a": 0, "a_1": 0}
    later = streams[1].following()
    await two_chunks(later)
    assert later.model == "a_1" and models.live == {"a": 0, "a_1": 0}
    used = {(sent.correlation_id, sent.model) for sent in call.sent}
    assert len(used) == len({sequence for sequence, _ in used})


@pytest.mark.parametrize("error", [OverloadedError("9 listeners are served", 3.0), ModelDownError("it has died")])
async def test_a_listener_whom_one_model_refuses_is_served_by_the_other(error: Exception) -> None:
    call = FakeCall(failing={0: error})
    models = two_models(call)
    stream = models.open()
    await stream.reserve()
    assert models.live == {"a": 0, "a_1": 1}
    await two_chunks(stream)
    assert await models.offline(PROMPT, [1], 1.0) is not None
    assert [sent.model for sent in call.sent] == ["a", "a_1", "a_1", "a_1", "a_1", "a"]
    assert models.live == {"a": 0, "a_1": 0}


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([ModelDownError("it has died"), OverloadedError("9 listeners are served", 3.0)], OverloadedError),
        ([UnavailableError("did not answer within 15 s")], UnavailableError),
    ],
    ids=["all refuse", "another reason"],
)
async def test_a_listener_is_told_why_nobody_serves_it(errors: list[Exception], raised: type[Exception]) -> None:
    """A request that fails for another reason than a refusal or the model's end is not repeated."""
    call = FakeCall(failing=dict(enumerate(errors)))
    models = two_models(call)
    stream = models.open()
    with pytest.raises(raised):
        await stream.reserve()
    if len(errors) > 1:
        await stream.abort()
        assert models.live == {"a": 0, "a_1": 0}
    assert len(call.sent) == len(errors)


async def test_a_model_that_fails_ends_the_calls_in_flight_and_gets_no_further_listeners() -> None:
    failed = set[str]()
    call = FakeCall(gate=asyncio.Event())
    models = two_models(call, failed)
    stream = models.open()
    starting = asyncio.create_task(stream.start(PROMPT, None))
    while not call.sent:
        await asyncio.sleep(0)
    failed.add("a")
    with pytest.raises(ModelDownError, match="a has failed"):
        await asyncio.wait_for(starting, 30)
    await stream.abort()
    assert models.live == {"a": 0, "a_1": 0} and [sent.model for sent in call.sent] == ["a"]
    assert stream.following().model == models.open().model == "a_1"
    failed.add("a_1")
    assert models.open().model == "a"  # whose error says why


@pytest.mark.parametrize("models", [["a"], ["a", "a_1"]])
async def test_a_place_that_is_refused_after_the_caller_has_gone_is_not_logged(models: list[str]) -> None:
    logged: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    call = FakeCall(gate=asyncio.Event(), failing={0: OverloadedError("9 listeners", 1.0)})
    reserving = asyncio.ensure_future(token2wav(call, models).open().reserve())
    await settle()
    reserving.cancel()
    await asyncio.wait({reserving})
    assert call.gate is not None
    call.gate.set()
    await settle()
    del reserving
    gc.collect()
    await asyncio.sleep(0)
    assert call.answered == 1 and logged == []
