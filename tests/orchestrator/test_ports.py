import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import MEL_BINS, SPEAKER_DIM
from cosyvoice_triton.errors import LostAnswerError, ModelDownError, OverloadedError, UnavailableError
from cosyvoice_triton.orchestrator.chunking import Hop
from cosyvoice_triton.orchestrator.ports import (
    TritonPromptEncoder,
    TritonToken2Wav,
    TritonToken2WavStream,
    new_correlation_id,
)
from cosyvoice_triton.voice.prompt import Prompt

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
    correlation_id: int
    start: bool
    end: bool

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
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str],
        *,
        correlation_id: int = 0,
        start: bool = False,
        end: bool = False,
    ) -> dict[str, np.ndarray]:
        number = len(self.sent)
        self.sent.append(Sent(model, inputs, correlation_id, start, end))
        if self.gate is not None:
            await self.gate.wait()
        self.answered += 1
        if number in self.failing:
            raise self.failing[number]
        return {name: self.answers[name] for name in outputs}


def token2wav(call: FakeCall, *, cumulative: bool) -> TritonToken2Wav:
    return TritonToken2Wav(call, ["token2wav"], cumulative=cumulative, first_speech_id=FIRST_SPEECH_ID)


async def two_chunks(stream: TritonToken2WavStream) -> None:
    """An utterance of 13 tokens: 6, then 7."""
    await stream.start(PROMPT, None)
    await stream.render(list(range(9)), Hop(0, 6, final=False))
    await stream.render(list(range(13)), Hop(6, 7, final=True))
    await stream.abort()


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_stream_is_one_sequence_with_the_voice_at_its_start_and_end_on_its_final_chunk(cumulative: bool) -> None:
    call = FakeCall()
    asyncio.run(two_chunks(token2wav(call, cumulative=cumulative).open()))
    assert [(sent.start, sent.end, sent["finalize"]) for sent in call.sent] == [
        (True, False, [False]),
        (False, False, [False]),
        (False, True, [True]),
    ]
    assert len({sent.correlation_id for sent in call.sent}) == 1
    assert ["prompt_speech_tokens" in sent.inputs for sent in call.sent] == [True, False, False]


def test_the_unet_model_gets_all_tokens_so_far_and_the_offset() -> None:
    call = FakeCall()
    asyncio.run(two_chunks(token2wav(call, cumulative=True).open()))
    assert [sent["target_speech_tokens"] for sent in call.sent] == [
        [],
        list(range(FIRST_SPEECH_ID, FIRST_SPEECH_ID + 9)),
        list(range(FIRST_SPEECH_ID, FIRST_SPEECH_ID + 13)),
    ]
    assert [sent["token_offset"] for sent in call.sent] == [[0], [0], [6]]


def test_the_dit_model_gets_the_new_tokens_and_their_look_ahead() -> None:
    call = FakeCall()
    asyncio.run(two_chunks(token2wav(call, cumulative=False).open()))
    assert [sent["target_speech_tokens"] for sent in call.sent] == [
        [],
        list(range(FIRST_SPEECH_ID, FIRST_SPEECH_ID + 9)),
        list(range(FIRST_SPEECH_ID + 6, FIRST_SPEECH_ID + 13)),
    ]
    assert all("token_offset" not in sent.inputs for sent in call.sent)


@pytest.mark.parametrize("cumulative", [True, False])
def test_tokens_beyond_the_look_ahead_are_not_sent(cumulative: bool) -> None:
    call = FakeCall()
    stream = token2wav(call, cumulative=cumulative).open()

    async def main() -> None:
        await stream.start(PROMPT, None)
        await stream.render(list(range(50)), Hop(0, 6, final=False))
        await stream.abort()

    asyncio.run(main())
    assert len(call.sent[1]["target_speech_tokens"]) == 9


def test_a_new_listener_has_a_place_before_the_voice_is_known() -> None:
    call = FakeCall()
    stream = token2wav(call, cumulative=False).open()

    async def main() -> None:
        await stream.reserve()
        await two_chunks(stream)

    asyncio.run(main())
    assert [(sent.start, sent.end, "prompt_speech_tokens" in sent.inputs) for sent in call.sent] == [
        (True, False, False),
        (False, False, True),
        (False, False, False),
        (False, True, False),
    ]


def test_a_refused_listener_is_told_without_another_call() -> None:
    call = FakeCall(failing={0: OverloadedError("9 listeners are served", 3.0)})
    stream = token2wav(call, cumulative=False).open()

    async def main() -> None:
        with pytest.raises(OverloadedError):
            await stream.reserve()
        await stream.abort()

    asyncio.run(main())
    assert len(call.sent) == 1


def test_a_later_segment_tells_token2wav_how_much_audio_its_listener_has_left() -> None:
    call = FakeCall()
    asyncio.run(token2wav(call, cumulative=False).open().start(PROMPT, 1.5))
    assert call.sent[0]["audio_left"] == [1.5]
    assert call.sent[0].inputs["audio_left"].dtype == np.float32


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
    assert (sent.start, sent.end, sent["target_speech_tokens"]) == (
        True,
        True,
        [FIRST_SPEECH_ID + 1, FIRST_SPEECH_ID + 2],
    )
    assert "token_offset" not in sent.inputs and "finalize" not in sent.inputs
    assert sent["speed"] == [1.25]


def test_a_failure_that_the_response_cache_kept_does_not_disable_a_voice() -> None:
    """Triton caches the error of a prompt model as an answer without outputs."""
    answers = {"prompt_spk_embedding": np.ones((1, SPEAKER_DIM), np.float16)}
    call = FakeCall(answers, failing={0: LostAnswerError("answered without prompt_spk_embedding")})
    wav = np.ones(100, np.float32)
    assert len(asyncio.run(TritonPromptEncoder(call, FIRST_SPEECH_ID, 8000.0).embedding(wav))) == SPEAKER_DIM
    assert [sent["reference_wav_len"] for sent in call.sent] == [[100], [100]]
    assert [sent.inputs["reference_wav"].shape for sent in call.sent] == [(1, 100), (1, 101)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_stream_whose_request_failed_is_still_ended_once(failing: int) -> None:
    call = FakeCall(failing={failing: RuntimeError("out of memory")})
    stream = token2wav(call, cumulative=False).open()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            await two_chunks(stream)
        await stream.abort()
        await stream.abort()

    asyncio.run(main())
    assert [sent.end for sent in call.sent] == [False] * (failing + 1) + [True]
    assert call.sent[-1]["finalize"] == [False] and call.sent[-1]["target_speech_tokens"] == []


def test_end_is_not_repeated_after_a_final_chunk_that_failed() -> None:
    call = FakeCall(failing={2: RuntimeError("out of memory")})
    stream = token2wav(call, cumulative=False).open()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            await two_chunks(stream)
        await stream.abort()

    asyncio.run(main())
    assert [sent.end for sent in call.sent] == [False, False, True]


def test_aborting_a_stream_that_never_started_sends_nothing() -> None:
    call = FakeCall()
    asyncio.run(token2wav(call, cumulative=False).open().abort())
    assert call.sent == []


def test_an_abort_that_fails_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    call = FakeCall(failing={1: ValueError("stream is not live")})
    stream = token2wav(call, cumulative=False).open()

    async def main() -> None:
        await stream.start(PROMPT, None)
        await stream.abort()

    asyncio.run(main())
    assert "stream is not live" in caplog.text


def test_an_abort_waits_for_the_chunk_in_flight() -> None:
    async def main() -> None:
        call = FakeCall(gate=asyncio.Event())
        stream = token2wav(call, cumulative=False).open()
        starting = asyncio.create_task(stream.start(PROMPT, None))
        await settle()
        starting.cancel()
        aborting = asyncio.create_task(stream.abort())
        await settle()
        assert [sent.end for sent in call.sent] == [False]
        assert call.gate is not None
        call.gate.set()
        await aborting
        assert [sent.end for sent in call.sent] == [False, True]
        assert call.answered == 2

    asyncio.run(main())


def test_a_client_who_leaves_during_an_abort_does_not_keep_the_stream_open() -> None:
    async def main() -> None:
        call = FakeCall(gate=asyncio.Event())
        models = token2wav(call, cumulative=False)
        stream = models.open()
        starting = asyncio.create_task(stream.start(PROMPT, None))
        await settle()
        starting.cancel()
        aborting = asyncio.create_task(stream.abort())
        await settle()
        aborting.cancel()
        await asyncio.wait({aborting})
        assert call.gate is not None
        call.gate.set()
        await settle()
        assert [sent.end for sent in call.sent] == [False, True] and not any(models.live.values())

    asyncio.run(main())


def test_correlation_ids_are_63_bits_and_differ() -> None:
    ids = {new_correlation_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(0 < correlation_id < 2**63 for correlation_id in ids)


def encode(work: Coroutine[Any, Any, np.ndarray]) -> np.ndarray:
    return asyncio.run(work)


WAV = np.linspace(-0.5, 0.5, 16_000, dtype=np.float32)


def test_prompt_tokens_become_speech_ids() -> None:
    call = FakeCall(answers={"prompt_speech_tokens": np.array([[FIRST_SPEECH_ID, FIRST_SPEECH_ID + 5]], np.int32)})
    tokens = encode(TritonPromptEncoder(call, FIRST_SPEECH_ID, 8000.0).tokens(WAV))
    assert tokens.tolist() == [0, 5] and tokens.dtype == np.int64
    (sent,) = call.sent
    assert sent.model == "audio_tokenizer"
    assert sent.inputs["reference_wav"].shape == (1, len(WAV)) and sent["reference_wav_len"] == [len(WAV)]


def test_the_x_vector_is_computed_from_the_whole_reference() -> None:
    call = FakeCall(answers={"prompt_spk_embedding": np.ones((1, SPEAKER_DIM), np.float16)})
    assert encode(TritonPromptEncoder(call, FIRST_SPEECH_ID, 8000.0).embedding(WAV)).shape == (SPEAKER_DIM,)
    assert call.sent[0].model == "speaker_embedding"


def test_the_mel_has_fifty_frames_per_second_and_calls_no_model() -> None:
    call = FakeCall()
    mel = encode(TritonPromptEncoder(call, FIRST_SPEECH_ID, 8000.0).mel(WAV))
    assert mel.shape == (50, MEL_BINS) and mel.dtype == np.float32
    assert call.sent == []


def two_models(call: FakeCall, failed: set[str] | None = None) -> TritonToken2Wav:
    gone: set[str] = failed or set()
    return TritonToken2Wav(
        call, ["a", "a_1"], cumulative=False, first_speech_id=FIRST_SPEECH_ID, failed=gone.__contains__
    )


def test_listeners_are_spread_over_the_models_and_keep_theirs() -> None:
    call = FakeCall()
    models = two_models(call)

    async def main() -> None:
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

    asyncio.run(main())
    by_sequence = {sent.correlation_id: set() for sent in call.sent}
    for sent in call.sent:
        by_sequence[sent.correlation_id].add(sent.model)
    assert all(len(used) == 1 for used in by_sequence.values())


@pytest.mark.parametrize("error", [OverloadedError("9 listeners are served", 3.0), ModelDownError("it has died")])
def test_a_listener_whom_one_model_refuses_is_served_by_the_other(error: Exception) -> None:
    call = FakeCall(failing={0: error})
    models = two_models(call)

    async def main() -> None:
        stream = models.open()
        await stream.reserve()
        assert models.live == {"a": 0, "a_1": 1}
        await two_chunks(stream)
        assert await models.offline(PROMPT, [1], 1.0) is not None

    asyncio.run(main())
    assert [sent.model for sent in call.sent] == ["a", "a_1", "a_1", "a_1", "a_1", "a"]
    assert models.live == {"a": 0, "a_1": 0}


def test_a_listener_whom_all_models_refuse_is_told_so() -> None:
    call = FakeCall(failing={0: ModelDownError("it has died"), 1: OverloadedError("9 listeners are served", 3.0)})
    models = two_models(call)

    async def main() -> None:
        stream = models.open()
        with pytest.raises(OverloadedError):
            await stream.reserve()
        await stream.abort()

    asyncio.run(main())
    assert len(call.sent) == 2 and models.live == {"a": 0, "a_1": 0}


def test_a_request_that_fails_for_another_reason_is_not_repeated() -> None:
    call = FakeCall(failing={0: UnavailableError("did not answer within 15 s")})

    async def main() -> None:
        with pytest.raises(UnavailableError, match="did not answer"):
            await two_models(call).open().reserve()

    asyncio.run(main())
    assert len(call.sent) == 1


def test_a_model_that_fails_ends_the_calls_in_flight_and_gets_no_further_listeners() -> None:
    async def main() -> None:
        failed: set[str] = {"x"}
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

    asyncio.run(main())
