"""What a request to the orchestrator may have: its values, a text in pieces, and speech that is converted."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.llm.interface import Sampling, preset_values
from cosyvoice_triton.orchestrator.conversion import LIVE, LIVE_STEP, WINDOW_TOKENS, Source
from cosyvoice_triton.orchestrator.request import RequestRules, SynthesisRequest, default_sampling
from cosyvoice_triton.orchestrator.text_stream import Limit, PieceStream, PieceStreams
from cosyvoice_triton.voice.prompt import Recording

from tests.support.fakes import FakeLM, FakePromptEncoder, fake_prompt, speech_request
from tests.support.pipeline import Pipeline, run_until

WAV = np.sin(np.arange(PROMPT_SAMPLE_RATE, dtype=np.float32))
LIMIT = Limit("target_text", 10, "characters")
SIZE = PROMPT_SAMPLE_RATE // TOKEN_RATE  # samples of a token


def check(defaults: Sampling | None = None, **inputs: Any) -> SynthesisRequest:
    given = {"target_text": "hello", "reference_wav": WAV, "reference_text": "reference"} | inputs
    return RequestRules(sampling=defaults or Sampling(), max_text_chars=100).request(**given)


def test_parameters_replace_the_defaults_and_those_of_triton_are_ignored() -> None:
    defaults = Sampling(temperature=0.5, max_tokens=99)
    assert check(defaults).sampling == defaults and check(defaults).max_tokens is None
    parameters = {"seed": 7, "temperature": 0, "top_p": "0.5", "top_k": 3, "repetition_penalty": 1.5, "max_tokens": "9"}
    sampling = check(parameters=parameters | {"triton_enable_empty_final_response": True, "speed": 1}).sampling
    assert sampling == Sampling(seed=7, temperature=0.0, top_p=0.5, top_k=3, repetition_penalty=1.5, max_tokens=9)

    assert check(defaults, parameters=parameters).max_tokens == 9
    with pytest.raises(ValueError, match="request parameter 'temprature' is unknown; known: .*temperature"):
        check(parameters={"temprature": 0.5})


def test_what_is_not_to_be_spelled_out_or_not_played_is_chosen_by_flags() -> None:
    assert check().as_is == frozenset() and check().played and not check(parameters={"played": False}).played
    spelled = {"url_normalization": "false", "phone_normalization": False}
    assert check(parameters=spelled).as_is == spelled.keys()
    with pytest.raises(ValueError, match="email_normalization must be true or false"):
        check(parameters={"email_normalization": "no"})


def test_a_preset_replaces_the_defaults_and_single_parameters_replace_its_values() -> None:
    cosyvoice2 = Sampling(temperature=1.0, top_p=0.8, top_k=25, repetition_penalty=1.0, ras_window=10, ras_tau=0.1)
    assert check(Sampling(top_k=9), parameters={"sampling": "cosyvoice2"}).sampling == cosyvoice2
    defaults = dataclasses.replace(cosyvoice2, max_tokens=99)
    sampling = check(defaults, parameters={"top_k": 7, "sampling": "triton", "ras_tau": "0.5"}).sampling
    assert sampling == Sampling(top_k=7, ras_tau=0.5, max_tokens=99)
    with pytest.raises(ValueError, match="sampling 'best' is not a preset; there are cosyvoice2, triton"):
        check(parameters={"sampling": "best"})


SERVERS = {"llm_transport": "openai", "llm_urls": ("http://a",)}


@pytest.mark.parametrize(
    ("settings", "expected", "warned"),
    [
        ({"sampling": "triton"}, Sampling(), False),
        ({"sampling": "triton", "max_tokens": 9}, Sampling(max_tokens=9), False),
        ({"sampling": "cosyvoice2"}, Sampling(**preset_values("cosyvoice2")), False),
        ({"sampling": "cosyvoice2", "llm_backend": "tensorrtllm"}, Sampling(), True),
        ({"sampling": "triton", "llm_backend": "tensorrtllm"}, Sampling(), False),
        ({"sampling": "cosyvoice2", "max_tokens": 9, **SERVERS}, Sampling(max_tokens=9), True),
        ({"sampling": "cosyvoice2", "llm_dialect": "chat", **SERVERS}, Sampling(), True),
        ({"sampling": "cosyvoice2", "llm_dialect": "vllm", **SERVERS}, Sampling(**preset_values("cosyvoice2")), False),
    ],
)
def test_the_default_sampling_is_one_that_the_llm_can_run(settings, expected, warned, caplog) -> None:
    assert default_sampling(OrchestratorConfig(model_dir="/m", **settings)) == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned


BAD: dict[str, tuple[object, ...]] = {"seed": (-1, "abc", True), "temperature": (float("nan"), -0.5), "top_p": (0, 1.5)}
BAD |= {"top_k": (2.5,), "repetition_penalty": (0,), "max_tokens": (0, "7.5"), "speed": (4.5, "fast")}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_a_bad_parameter_is_an_error_naming_it_and_its_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as error:
        check(parameters={name: value})
    assert str(value) in str(error.value)


def test_every_text_is_cleaned_and_a_reference_without_a_transcript_is_cross_lingual() -> None:
    assert [check(reference_text=text).voice.text for text in (None, "", "  \n")] == [""] * 3
    request = check(target_text=" one\n two<|eos1|> ", reference_text="three\t\nfour")
    assert (request.target_text, request.voice.text) == ("one\ntwo", "three four")
    assert check(instruct_text="<|endofprompt|>slowly\n please", reference_text="").instruct_text == "slowly please"


def test_an_instruction_before_the_text_is_the_request_s_instruction() -> None:
    text = "You are a helpful assistant. Speak sadly.<|endofprompt|>Hello."
    request = check(target_text=text, reference_text="")
    assert (request.target_text, request.instruct_text) == ("Hello.", "Speak sadly.")
    system = check(target_text="You are a helpful assistant.<|endofprompt|>Hello.")
    assert (system.target_text, system.instruct_text) == ("Hello.", "")
    told = check(instruct_text="You are a helpful assistant. Slowly.<|endofprompt|>", reference_text="")
    assert told.instruct_text == "You are a helpful assistant. Slowly."  # the prompt's own words are added once
    loudly = "You are a helpful assistant. Loudly.<|endofprompt|>"
    for other in ({"instruct_text": "Loudly.", "reference_text": ""}, {"reference_text": f"{loudly}Said."}):
        with pytest.raises(ValueError, match="'Speak sadly.'"):
            check(target_text=text, **other)


@pytest.mark.parametrize(
    ("given", "transcript", "instruction"),
    [
        ("You are a helpful assistant. Loudly.<|endofprompt|>Said.", "Said.", "Loudly."),
        ("You are a helpful assistant.<|endofprompt|>Said.", "Said.", ""),
        ("You are a helpful assistant.<|endofprompt|>", "", ""),
        ("Loudly.<|endofprompt|>", "", "Loudly."),
    ],
)
def test_an_instruction_before_the_transcript_is_followed_and_system_words_are_none(given, transcript, instruction):
    request = check(reference_text=given)
    assert (request.voice.text, request.instruct_text) == (transcript, instruction)
    both = check(reference_text="Said.", instruct_text="Loudly.")
    assert (both.voice.text, both.instruct_text) == ("Said.", "Loudly.")


def test_a_request_without_a_recording_names_a_speaker_or_means_the_default_voice() -> None:
    for speaker, voice in (("anna", "anna"), ("", None), (None, None)):
        assert RequestRules().request("hello", speaker=speaker).voice == voice


@pytest.mark.parametrize(("value", "flag"), [(True, True), ("false", False), ("True", True), (0, False), ("1", True)])
def test_flags_may_be_text(value: object, flag: bool) -> None:
    request = check(parameters={"text_frontend": value, "cross_lingual": value}, reference_text="")
    assert (request.normalize, request.cross_lingual) == (flag, flag)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"target_text": None}, "target_text is missing"),
        ({"target_text": " "}, "target_text has nothing to speak"),
        ({"target_text": "<|s_1|><|eos1|>"}, "target_text has nothing to speak"),
        ({"target_text": "x" * 101}, "target_text has 101 characters"),
        ({"reference_text": "<|s_1|>"}, "reference_text has nothing to speak"),
        ({"reference_wav_len": 0}, "reference_wav_len 0"),
        ({"reference_wav": WAV[:100]}, "100 samples"),
        ({"reference_wav": None}, "reference_text 'reference' without a reference_wav"),
        ({"reference_wav": None, "reference_text": None, "reference_wav_len": 5}, "reference_wav_len 5 without"),
        ({"speaker": "anna"}, "speaker 'anna' with a reference_wav"),
        ({"speaker": "anna", "reference_wav": None}, "reference_text 'reference' without a reference_wav"),
        ({"instruct_text": "<|s_1|>", "reference_text": ""}, "instruct_text has nothing to speak"),
        ({"instruct_text": "x" * 101, "reference_text": ""}, "instruct_text has 101 characters"),
        ({"parameters": {"cross_lingual": True}}, "cross_lingual with the reference_text 'reference'"),
        ({"parameters": {"cross_lingual": True}, "instruct_text": "sad"}, "cross_lingual with the instruct_text 'sad'"),
        ({"parameters": {"cross_lingual": "perhaps"}}, "cross_lingual must be true or false, not 'perhaps'"),
        ({"parameters": {"text_frontend": 2}}, "text_frontend must be true or false, not 2"),
    ],
)
def test_bad_input_is_an_error_naming_the_value(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**inputs)


@pytest.mark.parametrize("char", ["a", "\u0301", "<|", "[", "\n"])
def test_a_parameter_that_is_too_long_is_refused_at_once_whatever_it_is(char: str) -> None:
    """It may have any size that gRPC takes, as a tensor: tests/system/test_tensor_limits.py."""
    text = char * (4 << 20)
    begun = time.process_time()
    for _ in range(1000):
        with pytest.raises(ValueError, match=r"has \d+ characters, more than the limit of 2097152$"):
            check(parameters={"language": text})
    assert time.process_time() - begun < 4.0  # a second of CPU for all 4 GB of them, here


def text(idle_seconds: float = 60, pieces: str = "", end: bool = False) -> PieceStream:
    """A text of up to 100 characters, of which these have come."""
    stream = PieceStream(Limit("target_text", 100, "characters"), idle_seconds)
    if pieces:
        stream.add(pieces, end=end)
    return stream


def request_of(pieces: PieceStream, **fields: Any) -> SynthesisRequest:
    return dataclasses.replace(speech_request(reference_text="ten, chars"), pieces=pieces, **fields)


async def read(stream: PieceStream) -> list[Any]:
    return [piece async for piece in stream]


async def test_pieces_arrive_in_their_order_up_to_the_end() -> None:
    streams = PieceStreams(idle_seconds=60)
    with streams.open(7, LIMIT) as stream, streams.open("other", LIMIT) as other:
        reader = asyncio.create_task(read(stream))
        for piece, end in (("a", False), ("", False), ("bc", True)):
            streams.add(7, piece, end)
        other.add("x", end=True)
        assert await read(other) == ["x"]
        assert await reader == ["a", "bc"]


async def test_misuse_is_an_error_with_its_value_and_ends_with_the_request() -> None:
    streams = PieceStreams(idle_seconds=0.05)
    with pytest.raises(ValueError, match="no request in pieces has the sequence id 7"):
        streams.add(7, "a", False)
    with streams.open(7, LIMIT) as stream:
        with pytest.raises(ValueError, match="sequence id 7 is in use"), streams.open(7, LIMIT):
            pass
        streams.add(7, "a" * 9, False)
        with pytest.raises(ValueError, match="11 characters in its pieces so far, more than the limit of 10"):
            streams.add(7, "bc", False)
        with pytest.raises(ValueError, match="began with target_text, and this piece of it has another input"):
            streams.add(7, np.zeros(5, np.float32), False)
        with pytest.raises(ValueError, match=r"no further piece of it for 0\.05 s"):
            await read(stream)
        streams.add(7, "", True)
        with pytest.raises(ValueError, match="has ended already"):
            streams.add(7, "b", False)
    with pytest.raises(ValueError, match="no request in pieces"):
        streams.add(7, "a", False)


async def test_the_first_audio_comes_before_the_text_has_ended() -> None:
    """The fake's voice has 30 tokens, which are two blocks with the transcript's first ten letters."""
    llm = FakeLM(list(range(15)))
    pipeline = Pipeline(llm)
    async with pipeline:
        speech = text()
        listener = asyncio.create_task(pipeline.synthesize(request_of(speech, target_text="")))
        speech.add("abcd ", end=False)  # after the voice, the first block needs no text
        await run_until(lambda: len(llm.prompts) == 1)
        speech.add("efgh ", end=False)
        await run_until(lambda: len(pipeline.token2wav.streams) == 1 and len(pipeline.hops) == 1)
        assert len(llm.prompts) == 2 and not listener.done()
        speech.add("i", end=True)
        audio = np.concatenate(await listener)
    assert [sampling.max_tokens for sampling in llm.samplings] == [15, 15, 15, 750]
    assert [sampling.min_tokens for sampling in llm.samplings] == [15, 15, 15, 0]  # a block has no end
    assert [sampling.seed for sampling in llm.samplings] == [1, 16, 31, 46]
    assert audio.tolist() == list(range(15)) * 4


@pytest.mark.parametrize("limit", [7, 20, 50])
def test_max_tokens_limits_the_speech_of_a_text_in_pieces(limit: int) -> None:
    llm = FakeLM(finish_reason="length")
    llm.script = lambda prompt: [list(range(llm.samplings[-1].max_tokens))]  # type: ignore[method-assign]
    pipeline, warnings = Pipeline(llm), list[str]()
    request = request_of(text(pieces="abcd efgh i", end=True), max_tokens=limit)
    assert np.concatenate(pipeline.run(pipeline.synthesize(request, warnings.append))).size == limit
    assert [f"after {limit} tokens" in warning for warning in warnings] == [True]


def test_a_text_that_stops_ends_everything_with_an_error() -> None:
    pipeline = Pipeline(FakeLM(list(range(15))))
    request = request_of(text(idle_seconds=0.05, pieces="A beginning, then nothing."))
    with pytest.raises(ValueError, match="has not ended"):
        pipeline.run(pipeline.synthesize(request))


def speech(tokens: int) -> np.ndarray:
    """Samples of which each token's first one has its number, in thousandths."""
    wav = np.zeros(tokens * SIZE, np.float32)
    wav[::SIZE] = np.arange(tokens) / 1000
    return wav


class Tokenizer:
    """Reads the numbers of `speech`; those near an end that is not the speech's own are wrong."""

    def __init__(self, tokens: int, unsure: int = 0) -> None:
        self.windows: list[tuple[int, int]] = []  # first token, number of tokens
        self.tokens, self.unsure = tokens, unsure

    async def __call__(self, recording: Recording) -> np.ndarray:
        assert recording.rate == PROMPT_SAMPLE_RATE and len(recording.wav) <= WINDOW_TOKENS * SIZE
        numbers = np.round(recording.wav[::SIZE] * 1000).astype(np.int64)
        self.windows.append((int(numbers[0]), len(numbers)))
        if self.unsure and numbers[-1] < self.tokens - 1:
            numbers[-self.unsure :] = 9999
        return numbers


async def converted(source: Source, tokenizer: Tokenizer) -> list[int]:
    return [token async for chunk in source.tokens(tokenizer) for token in chunk.tokens]


async def pieces(wav: np.ndarray, size: int) -> AsyncGenerator[np.ndarray, None]:
    for begin in range(0, len(wav), size):
        yield wav[begin : begin + size]


@pytest.mark.parametrize("tokens", [13, 749, WINDOW_TOKENS, WINDOW_TOKENS + 1, 1500, 3000])
def test_a_recording_is_encoded_as_a_whole_and_a_longer_one_in_windows_that_overlap(tokens: int) -> None:
    """As a whole if the tokenizer reads it at once, as by upstream's `inference_vc`."""
    tokenizer = Tokenizer(tokens, unsure=40)
    assert asyncio.run(converted(Source.of(speech(tokens), PROMPT_SAMPLE_RATE), tokenizer)) == list(range(tokens))
    assert len(tokenizer.windows) == (1 if tokens <= WINDOW_TOKENS else -(-tokens // 700))


@pytest.mark.parametrize("size", [160, 4_000, 40_000])
async def test_what_somebody_speaks_is_encoded_as_it_comes(size: int) -> None:
    tokens, most = 400, LIVE_STEP + LIVE.ahead + -(-size // SIZE)
    tokenizer = Tokenizer(tokens, unsure=LIVE.ahead)
    source = Source(pieces(speech(tokens), size), PROMPT_SAMPLE_RATE, live=True)
    found, first = list[int](), 0
    async for chunk in source.tokens(tokenizer):
        found += chunk.tokens
        first = first or sum(window[1] for window in tokenizer.windows)
    assert first <= most  # tokens that were known by then
    assert (found) == list(range(tokens))
    assert max(length for _, length in tokenizer.windows) <= LIVE.context + most


def test_what_cannot_be_converted_is_named() -> None:
    def ask(**inputs: Any) -> Any:
        return RequestRules().request(**{"target_text": "", "source_wav": speech(50), "speaker": "anna", **inputs})

    request = ask(source_sample_rate=24_000, parameters={"speed": "1.5", "played": False})
    assert (request.voice, request.speed, request.played, request.source.rate) == ("anna", 1.5, False, 24_000)
    for inputs, message in (
        ({"source_wav": speech(10)}, "source_wav of 6400 samples lasts 0.4 s at 16000 Hz: expected 0.5 to 120.0 s"),
        ({"source_wav": 0 * speech(50)}, "source_wav is silent"),
        ({"source_wav": speech(50) * np.nan}, "source_wav is nan at sample 0"),
        ({"source_sample_rate": 44_101}, "source_sample_rate 44101 is not a multiple of 25"),
        ({"target_text": "Hello."}, "target_text 'Hello.' with a source_wav, whose own words are spoken"),
        ({"instruct_text": "Softly."}, "instruct_text 'Softly.' with a source_wav"),
        ({"parameters": {"speed": 9}}, "speed 9"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(**inputs)
    for seconds, message in ((0.2, "source_wav lasts 0.2 s: expected 0.5 s or more"), (121, "longer than 120 s")):
        wav = np.zeros(round(seconds * PROMPT_SAMPLE_RATE), np.float32)
        source = Source(pieces(wav, 8_000), PROMPT_SAMPLE_RATE, live=True)
        with pytest.raises(ValueError, match=message):
            asyncio.run(converted(source, Tokenizer(0)))


class SourceEncoder(FakePromptEncoder):
    async def tokens(self, recording: Recording) -> np.ndarray:
        return await Tokenizer(0)(recording)


@pytest.mark.parametrize("live", [False, True])
def test_the_source_s_tokens_are_spoken_in_the_voice_and_no_llm_is_asked(live: bool) -> None:
    pipeline = Pipeline(FakeLM([1]), SourceEncoder(), long_silence=range(100), silent_tokens=range(100))
    pipeline.voices["anna"] = fake_prompt(7, "Her words.")
    wav = speech(90)

    def request() -> Any:
        made = RequestRules().request("", source_wav=wav, speaker="anna", pieces=pieces(wav, 4_000) if live else None)
        return dataclasses.replace(made, timeline=True)

    chunks = pipeline.run(pipeline.synthesize(request()))
    np.testing.assert_array_equal(np.concatenate(chunks), 70_000 + np.arange(90))
    assert [hop.length for hop in pipeline.hops] == ([15] * 6 if live else [15, 30, 45])
    (whole,) = pipeline.run(pipeline.offline(request()))
    np.testing.assert_array_equal(whole, np.concatenate(chunks))
    assert not pipeline.llm.prompts
