"""From a request to its audio; speech of a given length."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.audible import SilenceTrimmer
from cosyvoice_triton.constants import SAMPLE_RATE, SPEAKER_DIM
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.orchestrator.length import FASTEST, SLOWEST, fitting_speed, misfit
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.text.markup import without_duration
from cosyvoice_triton.voice.mix import Mix
from cosyvoice_triton.voice.prompt import Prompt, Recording

from tests.orchestrator.test_request import check, text
from tests.support.fakes import (
    PROMPT_TOKENS,
    FakeLM,
    FakePromptEncoder,
    FakeTextPreparer,
    FakeToken2Wav,
    Step,
    fake_prompt,
)
from tests.support.pipeline import FakeVoices, Pipeline, Speak, one_by_one, run_until, speech_request


@pytest.mark.parametrize("what", ["a disk of voices that hangs", "the reading of a long text"])
async def test_the_event_loop_does_not_wait_for(what: str) -> None:
    asked, answered = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        assert answered.wait(60)

    class Voices(FakeVoices):
        def pronunciation(self, voice: Recording | str | None) -> dict[str, str]:
            wait()
            return {}

    class Texts(FakeTextPreparer):
        def segments(self, text: str, normalize: bool, request_seconds: float, *rest: object) -> Iterator[str]:
            wait()
            yield text

    pipeline, long = Pipeline(FakeLM([1])), "long" in what
    pipeline.voices, pipeline.texts = (FakeVoices(), Texts()) if long else (Voices(), FakeTextPreparer())
    pipeline.voices["anna"] = fake_prompt(1)
    request = dataclasses.replace(speech_request(), voice="anna", target_text="word " * 100 if long else "word")
    async with pipeline:
        speech = asyncio.create_task(pipeline.synthesize(request))
        await run_until(asked.is_set)
        answered.set()  # by the loop, which goes on
        assert sum(waveform.size for waveform in await speech) == 1


PARTS = ("tokens", "mel", "embedding")
# What waits -> what has been reached nevertheless, by a request with or without a transcript.
CONCURRENT: dict[str, tuple[tuple[str, ...], str, Callable[[Pipeline], bool]]] = {
    "the parts of a prompt are requested together": (PARTS, "known", lambda each: len(each.encoder.started) == 3),
    "the LLM starts before the x-vector is ready": (("embedding",), "known", lambda each: len(each.llm.prompts) == 1),
    "without a transcript the LLM waits for no prompt": (PARTS, "", lambda each: len(each.llm.prompts) == 1),
    "token2wav starts before the first token": (("token",), "known", lambda each: each.token2wav.live == 1),
}


@pytest.mark.parametrize("what", CONCURRENT)
async def test_nothing_waits_for_what_it_does_not_need(what: str) -> None:
    waiting, transcript, reached = CONCURRENT[what]
    gate, first = asyncio.Event(), [asyncio.Event()] if waiting == ("token",) else []
    pipeline = Pipeline(FakeLM(*first, [1]), FakePromptEncoder(gates=dict.fromkeys(waiting, gate)))
    async with pipeline:
        synthesis = asyncio.create_task(pipeline.synthesize(speech_request(reference_text=transcript)))
        await run_until(lambda: reached(pipeline))
        assert not any(stream.hops or (stream.started and not first) for stream in pipeline.token2wav.streams)
        for event in (gate, *first):
            event.set()
        assert len(await synthesis) == 1


CONTINUED = [7] * PROMPT_TOKENS


@pytest.mark.parametrize(
    ("follows", "asked", "of_voice", "transcript", "prompt", "warning"),
    [
        ("with transcript", "sadly", "", "said", LLMPrompt("hello", "said", CONTINUED, "sadly"), ""),
        ("with transcript", "", "softly", "said", LLMPrompt("hello", "said", CONTINUED, "softly"), ""),
        ("with transcript", "sadly", "softly", "said", LLMPrompt("hello", "said", CONTINUED, "sadly"), ""),
        ("with transcript", "", "softly", "", LLMPrompt("hello", instruction="softly"), ""),
        ("with transcript", "sadly", "", "", LLMPrompt("hello", instruction="sadly"), ""),
        ("with transcript", "", "", "", LLMPrompt("hello"), ""),
        ("alone", "sadly", "", "said", LLMPrompt("hello", instruction="sadly"), "the transcript 'said' was left out"),
        ("alone", "", "softly", "said", LLMPrompt("hello", instruction="softly"), "the transcript 'said' was left out"),
        ("alone", "", "", "said", LLMPrompt("hello", "said", CONTINUED), ""),
        ("none", "sadly", "", "said", LLMPrompt("hello", "said", CONTINUED), "instruct_text was left out"),
        ("none", "", "softly", "said", LLMPrompt("hello", "said", CONTINUED), "instruct_text was left out"),
    ],
)
def test_what_the_llm_gets_of_an_instruction_and_a_transcript(follows, asked, of_voice, transcript, prompt, warning):
    """A request's recording is continued with its instruction, as by upstream's Triton runtime for CosyVoice3. Without
    a transcript only the flow reproduces the voice."""
    pipeline, warnings = Pipeline(FakeLM([1]), instructions=follows), list[str]()
    request = dataclasses.replace(speech_request(voice=7, reference_text=transcript), instruct_text=asked)
    request = dataclasses.replace(request, voice=dataclasses.replace(request.voice, instruction=of_voice))
    pipeline.run(pipeline.synthesize(request, warnings.append))
    assert pipeline.llm.prompts == [prompt] and pipeline.llm.samplings == [request.sampling]
    assert pipeline.token2wav.streams[0].prompt.tokens.tolist() == CONTINUED
    (left_out,) = [each for each in warnings if "was left out" in each] or [""]
    assert left_out.startswith(warning) and bool(left_out) == bool(warning)


@pytest.mark.parametrize("registered", [fake_prompt(7, "its text"), Recording(speech_request(7).voice.wav, "its text")])
def test_a_registered_voice_gives_the_same_prompts_as_its_recording(registered: Prompt | Recording) -> None:
    pipeline = Pipeline(FakeLM([1]))
    pipeline.voices["anna"] = registered
    request = dataclasses.replace(speech_request(), voice="anna")
    pipeline.run(pipeline.synthesize(request))
    pipeline.run(pipeline.synthesize(dataclasses.replace(request, cross_lingual=True)))
    pipeline.run(pipeline.synthesize(dataclasses.replace(request, instruct_text="sadly")))
    assert pipeline.llm.prompts == [
        LLMPrompt("hello", "its text", [7] * PROMPT_TOKENS),
        LLMPrompt("hello"),
        LLMPrompt("hello", instruction="sadly"),
    ]
    assert {int(stream.prompt.tokens[0]) for stream in pipeline.token2wav.streams} == {7}
    assert bool(pipeline.encoder.started) == isinstance(registered, Recording)


@pytest.mark.parametrize("instruction", ["", "sadly"])
def test_a_voice_of_an_x_vector_alone_gives_the_llm_no_speech_and_the_flow_no_prompt(instruction: str) -> None:
    """As upstream's inference_sft and inference_instruct."""
    pipeline = Pipeline(FakeLM(*one_by_one(20)))
    known = fake_prompt(7, "")
    pipeline.voices["anna"] = dataclasses.replace(known, tokens=known.tokens[:0], mel=known.mel[:0])
    request = dataclasses.replace(speech_request(), voice="anna", instruct_text=instruction)
    audio = pipeline.run(pipeline.synthesize(request))
    np.testing.assert_array_equal(np.concatenate(audio), 70_000 + np.arange(20))
    assert pipeline.llm.prompts == [LLMPrompt("hello", instruction=instruction)]


def test_a_mix_is_an_x_vector_alone_of_which_the_recordings_are_encoded() -> None:
    pipeline = Pipeline(FakeLM([1]))
    x_vectors = [np.eye(1, SPEAKER_DIM, at, dtype=np.float32)[0] for at in range(2)]
    known = dataclasses.replace(fake_prompt(7), embedding=x_vectors[0])
    recording = speech_request(3).voice
    assert isinstance(recording, Recording)
    pipeline.voices["a(3)+b"] = Mix([(known, 3.0), (recording, 1.0)])
    pipeline.run(pipeline.synthesize(dataclasses.replace(speech_request(), voice="a(3)+b")))
    assert pipeline.llm.prompts == [LLMPrompt("hello")]
    assert pipeline.encoder.started == ["embedding"]
    (stream,) = pipeline.token2wav.streams
    assert len(stream.prompt.tokens) == len(stream.prompt.mel) == 0
    encoded = np.full(SPEAKER_DIM, SPEAKER_DIM**-0.5)
    np.testing.assert_allclose(stream.prompt.embedding, 0.75 * x_vectors[0] + 0.25 * encoded, rtol=1e-6)


def test_text_and_transcript_are_spelled_out_if_the_request_enables_it() -> None:
    """Segments fit what one request to the LLM can speak: 100 tokens are 4 s."""

    class Noting(FakeTextPreparer):
        def segments(self, text: str, normalize: bool, request_seconds: float, *rest: object) -> Iterator[str]:
            yield f"{text.upper() if normalize else text} in {request_seconds:g} s"

        def transcript(self, text: str, normalize: bool) -> str:
            return text.upper() if normalize else text

    pipeline = Pipeline(FakeLM([1]))
    pipeline.texts = Noting()
    request = dataclasses.replace(speech_request(), sampling=Sampling(max_tokens=100))
    for normalize in (True, False):
        pipeline.run(pipeline.synthesize(dataclasses.replace(request, normalize=normalize)))
    texts = [(prompt.target_text, prompt.prompt_text) for prompt in pipeline.llm.prompts]
    assert texts == [("HELLO in 4 s", "REFERENCE"), ("hello in 4 s", "reference")]


def test_an_unknown_voice_ends_the_request_and_leaves_nothing_behind() -> None:
    pipeline = Pipeline(FakeLM([1]))
    with pytest.raises(KeyError, match="anna"):
        pipeline.run(pipeline.synthesize(dataclasses.replace(speech_request(), voice="anna")))
    assert pipeline.llm.prompts == [] and [stream.live for stream in pipeline.token2wav.streams] == [False]


@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_offline_makes_one_waveform_in_one_call_at_any_speed(speed: float) -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(40)))
    request = dataclasses.replace(speech_request(voice=2), speed=speed)
    np.testing.assert_array_equal(pipeline.run(pipeline.offline(request))[0], 20_000 + np.arange(40))
    assert pipeline.token2wav.offline_calls == [(list(range(40)), speed)] and pipeline.token2wav.streams == []
    pipeline.run(pipeline.synthesize(request))
    assert [stream.speed for stream in pipeline.token2wav.streams] == [speed]


@pytest.mark.parametrize("tokens_before", [0, 18, 60])
@pytest.mark.parametrize("rendering", [False, True])
def test_an_error_of_the_llm_ends_the_stream_also_while_a_chunk_is_rendered(tokens_before, rendering) -> None:
    """The gate of token2wav is never opened."""
    llm = FakeLM(*one_by_one(tokens_before), UnavailableError("the LLM is down"))
    pipeline = Pipeline(llm, token2wav=FakeToken2Wav(gate=asyncio.Event() if rendering else None))
    with pytest.raises(UnavailableError, match="the LLM is down"):
        pipeline.run()
    assert pipeline.token2wav.streams[0].aborts == 1


@pytest.mark.parametrize("failing", [*PARTS, "start", 0, 1])
def test_an_error_of_another_model_closes_the_llm_stream_and_aborts_that_of_token2wav_once(failing: Any) -> None:
    failures = {failing: RuntimeError("out of memory")}
    llm = FakeLM(*one_by_one(60), asyncio.Event())
    pipeline = Pipeline(llm, FakePromptEncoder(failures=failures), FakeToken2Wav(failures=failures))
    with pytest.raises(RuntimeError, match="out of memory"):
        pipeline.run()
    assert [(each.started, each.aborts) for each in pipeline.token2wav.streams] == [(failing not in PARTS, 1)]


@pytest.mark.parametrize("speak", [Pipeline.synthesize, Pipeline.offline])
def test_an_llm_without_speech_tokens_is_an_error_naming_the_text(speak: Speak) -> None:
    pipeline = Pipeline(FakeLM())
    with pytest.raises(ValueError, match="no speech token for the text 'quiet'"):
        pipeline.run(speak(pipeline, speech_request(text="quiet")))


STAGES: dict[str, Callable[[Pipeline], bool]] = {
    "prompt": lambda pipeline: len(pipeline.encoder.started) == 3,
    "first token": lambda pipeline: pipeline.token2wav.live == 1,
    "chunk": lambda pipeline: bool(pipeline.token2wav.streams) and bool(pipeline.hops),
    "next tokens": lambda pipeline: bool(pipeline.token2wav.streams) and len(pipeline.hops) == 1,
}


@pytest.mark.parametrize("stage", STAGES)
async def test_cancelling_frees_everything_at_every_stage(stage: str) -> None:
    never = asyncio.Event()
    script: Sequence[Step] = [never] if stage == "first token" else [*one_by_one(18), never]
    pipeline = Pipeline(
        FakeLM(*script),
        FakePromptEncoder(gates={"tokens": never} if stage == "prompt" else {}),
        FakeToken2Wav(gate=never if stage == "chunk" else None),
    )
    with pytest.raises(asyncio.CancelledError):
        async with pipeline:
            synthesis = asyncio.create_task(pipeline.synthesize())
            await run_until(lambda: STAGES[stage](pipeline))
            for _ in range(5):
                await asyncio.sleep(0)
            synthesis.cancel()
            await synthesis
    assert [stream.aborts for stream in pipeline.token2wav.streams] == [1]


async def test_the_first_hop_is_short_where_the_second_chunks_of_streams_before_came_soon() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(60)))
    seeded, pieces = speech_request(), text(pieces="hello", end=True)
    request = dataclasses.replace(seeded, sampling=Sampling())

    async def chunks(request: SynthesisRequest) -> list[int]:
        return [len(waveform) for waveform in await pipeline.synthesize(request)]

    async with pipeline:
        for _ in range(4):
            assert await chunks(request) == [15, 30, 15]
        assert await chunks(request) == [10, 15, 30, 5]
        greedy = dataclasses.replace(request, sampling=Sampling(temperature=0.0))
        other_kinds: tuple[dict[str, Any], ...] = ({"speed": 1.5}, {"played": False}, {"pieces": pieces})
        others = [seeded, greedy, *(dataclasses.replace(request, **kind) for kind in other_kinds)]
        assert [(await chunks(other))[0] for other in others] == [15] * 5
        assert await chunks(request) == [10, 15, 30, 5]
    urgent = [prompt.urgent_tokens for prompt in pipeline.llm.prompts]
    assert urgent[:10] == [*[18] * 4, 13, 18, 18, 18, 0, 18] and urgent[-1] == 13


def spoken(before: float, heard: float, after: float, speed: float = 1.0) -> np.ndarray:
    """Silence, noise and silence of so many seconds at speed 1."""
    samples = [round(seconds / speed * SAMPLE_RATE) for seconds in (before, heard, after)]
    noise = 0.3 * np.random.default_rng(1).standard_normal(samples[1]).astype(np.float32)
    return np.concatenate([np.zeros(samples[0], np.float32), noise, np.zeros(samples[2], np.float32)])


@pytest.mark.parametrize("seconds", [2.3, 2.9, 3.6])
@pytest.mark.parametrize("trims", [True, False])
def test_the_speed_makes_segments_as_long_as_wanted_after_their_silence_is_cut(seconds: float, trims: bool) -> None:
    parts, pause = [(0.5, 1.0, 0.02), (0.01, 1.3, 0.6)] if trims else [(0, 1.0, 0), (0, 1.6, 0)], 0.2
    speed = fitting_speed([spoken(*part) for part in parts], round(pause * SAMPLE_RATE), seconds, trims=trims)
    waves = [spoken(*part, speed=speed) for part in parts]
    waves = [SilenceTrimmer().trimmed(wave, final=True) if trims else wave for wave in waves]
    assert sum(wave.size for wave in waves) / SAMPLE_RATE + pause == pytest.approx(seconds, rel=0.015)
    assert not misfit(seconds * 1.02, seconds)


def test_a_length_out_of_reach_gets_the_nearest_speed_and_a_warning() -> None:
    wave = spoken(0, 2.0, 0)
    assert fitting_speed([wave], 0, 1.0, trims=False) == FASTEST
    assert fitting_speed([wave], 0, 9.0, trims=False) == SLOWEST
    token2wav, warnings = FakeToken2Wav(), list[str]()
    pipeline = Pipeline(FakeLM(*one_by_one(40)), token2wav=token2wav)
    request = dataclasses.replace(speech_request(), duration=1.0)
    (streamed,) = pipeline.run(pipeline.synthesize(request, on_warning=warnings.append))
    assert streamed.size == 40 and [speed for _, speed in token2wav.offline_calls] == [1.0, SLOWEST]
    assert "not 1: it is at a speed of 0.7 to 1.4" in warnings[-1]


def test_a_duration_is_a_parameter_or_markup_around_the_whole_text() -> None:
    assert check().duration is None and check(parameters={"duration": "2.5"}).duration == 2.5
    request = check(target_text='<speak> <prosody duration="1500ms">Hello <s>you</s></prosody></speak>')
    assert (request.duration, request.target_text) == (1.5, "<speak>Hello <s>you</s></speak>")
    assert without_duration("<speak>Hello</speak>") == ("<speak>Hello</speak>", None)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"parameters": {"duration": "0.1"}}, "duration 0.1 is not in 0.5..120"),
        ({"parameters": {"duration": 2, "speed": 1.1}}, "duration 2 is for a whole text without a speed"),
        ({"target_text": "<speak><prosody duration='long'>Hello</prosody></speak>"}, "duration 'long' of <prosody>"),
    ],
)
def test_a_duration_that_cannot_be_is_named(inputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        check(**inputs)
