"""Both stacks in the real tritonserver, through the real clients."""

import asyncio
import os
import queue
import shutil
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.cli import client_grpc
from cosyvoice_triton.cli import voice as voice_command
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.requests import SpeechResult, Utterance, read_reference
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.text import TextFrontend
from cosyvoice_triton.voice.audio import mel_spectrogram
from cosyvoice_triton.voice.encoders import SpeakerEncoder
from cosyvoice_triton.voice.files import save_voice
from cosyvoice_triton.voice.mix import Mix
from cosyvoice_triton.voice.prompt import Prompt

from tests.support.server_requests import (
    MODELS,
    STACKS,
    TEXT,
    VOICE,
    VOICE_TEXT,
    Serve,
    assert_speech,
    at_rate,
    inputs_of,
    process_of,
    request_arrays,
    send,
    stream,
    text_array,
    wav_of,
)

pytestmark = pytest.mark.server

STREAMS = 8  # slots of token2wav; idle streams keep theirs
SETTINGS = {"max_streams": str(STREAMS), "idle_seconds": "600"}


@pytest.fixture(scope="module", params=STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    """A fixture, not a mark: pytest then runs all tests of one stack together, and its server starts once."""
    return str(request.param)


@pytest.fixture(scope="module")
def voice() -> np.ndarray:
    return read_reference(VOICE)


# --- valid requests -----------------------------------------------------------------------------------------------


def test_the_grpc_client_writes_a_streamed_wav(stack: str, serve: Serve, tmp_path: Path) -> None:
    host, port = serve(stack=stack, settings=SETTINGS).grpc_url.split(":")
    output = tmp_path / "speech.wav"
    arguments = ["--server-addr", host, "--server-port", port, "--model-name", MODELS[stack], "--target-text", TEXT]
    arguments += ["--reference-audio", str(VOICE), "--reference-text", VOICE_TEXT, "--output-audio", str(output)]
    assert client_grpc.main(arguments) == 0
    assert output.stat().st_size > SAMPLE_RATE // 10


def test_long_speech_arrives_in_several_chunks_the_first_before_the_end(
    stack: str, serve: Serve, voice: np.ndarray
) -> None:
    utterance = Utterance("word " * 60, voice, VOICE_TEXT, {"seed": 1})
    speech = stream(serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack], utterance)
    assert_speech(speech)
    assert len(speech.arrivals) > 1
    assert speech.first_chunk < speech.total


def test_a_recording_without_its_text_clones_the_voice_across_languages(
    stack: str, serve: Serve, voice: np.ndarray
) -> None:
    speech = stream(serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack], Utterance("你好，世界。", voice))
    assert_speech(speech)


@pytest.mark.parametrize("seconds", [10, 40])
def test_padding_after_the_recording_changes_nothing(stack: str, seconds: int, serve: Serve, voice: np.ndarray) -> None:
    """Upstream's clients pad recordings to multiples of ten seconds and send the true length."""
    address, model = serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack]
    plain = stream(address, model, Utterance(TEXT, voice, VOICE_TEXT, {"seed": 9}))
    padded = np.zeros((1, seconds * PROMPT_SAMPLE_RATE), np.float32)
    padded[0, : voice.size] = voice
    inputs = request_arrays(voice) | {"reference_wav": padded}
    answer = send(address, model, inputs, {"seed": 9})
    assert answer.error is None
    np.testing.assert_allclose(answer.waveform, plain.waveform, atol=1e-3)


# --- long texts, modes and registered voices ---------------------------------------------------------------------

LONG_TEXT = "The first sentence costs $3.50 and is spoken by nobody. " * 2 + "今天是2023年11月5日，一切都好。"


def test_a_long_text_is_one_stream_of_its_segments(stack: str, serve: Serve, voice: np.ndarray) -> None:
    """The LLM gives each segment the answer that it gives to the segment alone, with the same voice and seed. Only the
    first one has the same audio, too: later ones begin with longer hops."""
    address, model, parameters = (
        serve(stack=stack, settings=SETTINGS).grpc_url,
        MODELS[stack],
        {"seed": 3, "max_tokens": 200},
    )
    segments = list(TextFrontend().segments(LONG_TEXT, request_seconds=200 / TOKEN_RATE))  # short ones
    assert len(segments) > 2 and "three dollars and fifty cents" in segments[0]
    whole = stream(address, model, Utterance(LONG_TEXT, voice, VOICE_TEXT, parameters))
    first, *others = [stream(address, model, Utterance(text, voice, VOICE_TEXT, parameters)) for text in segments]
    assert whole.first_chunk < whole.total / 2
    np.testing.assert_allclose(whole.waveform[: first.waveform.size], first.waveform, atol=1e-3)
    assert whole.waveform.size == first.waveform.size + sum(part.waveform.size for part in others)


@pytest.fixture(scope="module")
def anna(demo_models: Path, stack: str) -> str:
    """The English recording as a registered voice."""
    (demo_models / "voices").mkdir(exist_ok=True)
    shutil.copy(VOICE, demo_models / "voices" / "anna.wav")
    (demo_models / "voices" / "anna.txt").write_text(VOICE_TEXT)
    return "anna"


@pytest.mark.parametrize("parameters", [{}, {"cross_lingual": True}])
def test_a_registered_voice_gives_the_same_audio_as_its_recording(
    stack: str, parameters: dict[str, Any], serve: Serve, voice: np.ndarray, anna: str
) -> None:
    address, model = serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack]
    named = Utterance(TEXT, parameters={"seed": 4} | parameters, speaker=anna)
    sent = Utterance(TEXT, voice, None if parameters else VOICE_TEXT, {"seed": 4})
    np.testing.assert_allclose(stream(address, model, named).waveform, stream(address, model, sent).waveform, atol=1e-3)


def test_a_voice_added_while_the_server_runs_can_be_used_at_once(
    stack: str, serve: Serve, demo_models: Path, tmp_path: Path
) -> None:
    host, port = serve(stack=stack, settings=SETTINGS).grpc_url.split(":")
    arguments = ["--server-addr", host, "--server-port", port, "--model-name", MODELS[stack], "--target-text", TEXT]
    arguments += ["--speaker", f"new-{stack}", "--output-audio", str(tmp_path / "speech.wav")]
    assert client_grpc.main(arguments) == 1
    register = ["add", str(demo_models), f"new-{stack}", "--stack", stack, "--reference-audio", str(VOICE)]
    assert voice_command.main([*register, "--reference-text", VOICE_TEXT]) == 0
    assert client_grpc.main(arguments) == 0


@pytest.fixture(scope="module")
def mixed(anna: str, stack: str, demo_models: Path, voice: np.ndarray) -> tuple[str, str, str]:
    """Two voices to mix, a recording and an x-vector, and the recording's x-vector as a voice of its own."""
    x_vector = SpeakerEncoder(demo_models / stacks.named(stack).checkpoint)([voice])[0].astype(np.float16).astype(float)
    x_vectors = {
        "only-anna": (x_vector / np.linalg.norm(x_vector)).astype(np.float16),  # as models send it to each other
        "only-bert": np.random.default_rng(0).normal(0, 1, 192),
    }
    for name, values in x_vectors.items():
        save_voice(demo_models / "voices" / f"{name}.safetensors", Prompt.aligned(Mix.tokens, Mix.mel, values))
    return anna, "only-bert", "only-anna"


def test_a_mix_of_voices_is_between_them_in_the_order_of_the_weights(
    stack: str, serve: Serve, mixed: tuple[str, str, str]
) -> None:
    address, model, (a, b, only_a) = serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack], mixed
    names = (only_a, f"{a}(2)+{a}", f"{a}(3)+{b}", f"{a}+{b}(3)")
    spoken = [stream(address, model, Utterance(TEXT, None, None, {"seed": 2}, name)).waveform for name in names]
    assert len({waveform.size for waveform in spoken}) == 1  # the LLM gets nothing of any of the voices
    alone, *others = (mel_spectrogram(torch.from_numpy(waveform)[None])[0].numpy() for waveform in spoken)
    itself, near, far = (float(np.linalg.norm(mel - alone)) for mel in others)
    assert itself < 0.01 * far
    assert 0.1 * far < near < 0.9 * far


def test_a_mix_that_cannot_be_made_is_refused_with_its_value(
    stack: str, serve: Serve, voice: np.ndarray, mixed: tuple[str, str, str]
) -> None:
    address, arrays, (a, b, _) = serve(stack=stack, settings=SETTINGS).grpc_url, request_arrays(voice), mixed
    unnamed = {name: value for name, value in arrays.items() if name not in NO_RECORDING}
    for speaker, words in {
        f"{a}+nobody": f"unknown speaker 'nobody' in '{a}+nobody', whose voices must be registered",
        f"{a}(0)+{b}": f"the weight '0' of '{a}' is not a number above 0",
        f"{a}+{b}(inf)": f"the weight 'inf' of '{b}'",
        "+".join([a] * 5): "mixes 5 voices, more than 4",
    }.items():
        answer = send(address, MODELS[stack], unnamed | {"speaker": text_array(speaker)})
        assert answer.error is not None and words in answer.error and answer.waveform.size == 0
    answer = send(address, MODELS[stack], arrays | {"speaker": text_array(f"{a}+{b}")})
    assert answer.error is not None and f"speaker '{a}+{b}' with a reference_wav" in answer.error


@pytest.fixture(params=["recording", "x-vector"])
def spk2info(request: pytest.FixtureRequest, stack: str, demo_models: Path) -> Iterator[str]:
    """The speaker of a spk2info.pt next to the checkpoint, where upstream's server has it."""
    rng = np.random.default_rng(0)
    entry: dict[str, Any] = {"embedding": torch.from_numpy(rng.normal(0, 1, (1, 192))).float()}
    if request.param == "recording":
        entry |= {
            "prompt_text": "What it says.",
            "speech_token": torch.from_numpy(rng.integers(0, 6561, (1, 50))),
            "speech_feat": torch.from_numpy(rng.normal(-6, 1, (1, 100, 80))).float(),
        }
    file = demo_models / stacks.named(stack).checkpoint / "spk2info.pt"
    torch.save({"001": entry}, file)
    yield "001"
    file.unlink()


def test_upstreams_client_without_a_voice_hears_the_speaker_001_of_spk2info(
    stack: str, serve: Serve, spk2info: str
) -> None:
    """It then sends the text alone, see tests/load/test_jobs.py."""
    address, model = serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack]
    unnamed, named = (stream(address, model, Utterance(TEXT, None, None, {"seed": 2}, who)) for who in (None, spk2info))
    assert_speech(unnamed)
    np.testing.assert_allclose(unnamed.waveform, named.waveform, atol=1e-3)
    instructed = Utterance(TEXT, None, None, {"seed": 2}, spk2info, instruct_text="Speak sadly.")
    assert_speech(stream(address, model, instructed))


def test_an_instruction_changes_the_speech(stack: str, serve: Serve, voice: np.ndarray) -> None:
    address, model = serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack]
    plain, sad, happy = (
        stream(address, model, Utterance(TEXT, voice, parameters={"seed": 6}, instruct_text=text))
        for text in (None, "Speak sadly.", "Speak happily.")
    )
    assert_speech(sad)
    assert not np.array_equal(sad.waveform, plain.waveform) and not np.array_equal(sad.waveform, happy.waveform)


def test_a_small_max_tokens_cuts_nothing_off(stack: str, serve: Serve, voice: np.ndarray) -> None:
    """The LLM continues its answer. It ends at about 75 tokens, whatever the text."""
    address, arrays = serve(stack=stack, settings=SETTINGS).grpc_url, request_arrays(voice)
    for parameters in ({"seed": 1}, {"max_tokens": 20, "seed": 1}):
        answer = send(address, MODELS[stack], arrays, parameters)
        assert answer.error is None and answer.warning is None
        assert 40 < answer.waveform.size / SAMPLE_RATE * TOKEN_RATE < 110


@pytest.mark.parametrize("stack", ["dit"], indirect=True)
def test_repetition_aware_sampling_reaches_the_llm(stack: str, serve: Serve, voice: np.ndarray) -> None:
    address, arrays = serve(stack=stack, settings=SETTINGS).grpc_url, request_arrays(voice)
    narrow = {"seed": 1, "sampling": "cosyvoice2", "top_k": 1}
    looping, free = (send(address, MODELS[stack], arrays, narrow | {"ras_window": window}) for window in (0, 10))
    assert looping.error is free.error is None
    assert looping.waveform.shape != free.waveform.shape or not np.array_equal(looping.waveform, free.waveform)


# --- invalid requests ------------------------------------------------------------------------------------------------


NOISE = np.random.default_rng(0).normal(0, 0.1, 31 * PROMPT_SAMPLE_RATE).astype(np.float32)
SECOND = NOISE[:PROMPT_SAMPLE_RATE]
REMOVED = np.zeros(0)  # marks a tensor to leave out
NO_RECORDING = dict.fromkeys(("reference_wav", "reference_wav_len", "reference_text"), REMOVED)

# name: (tensors that replace those of a valid request, text that the message must contain)
BAD_REQUESTS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "empty text": ({"target_text": text_array("")}, "target_text"),
    "whitespace": ({"target_text": text_array(" \n\t ")}, "target_text"),
    "only control tokens": ({"target_text": text_array("<|s_1|><|eos1|> <|sos|>")}, "<|s_1|>"),
    "text without a recording": ({"reference_wav": REMOVED, "reference_wav_len": REMOVED}, "reference_text"),
    "no voice at all": (NO_RECORDING, "reference_wav"),
    "recording of no samples": (wav_of(SECOND[:0]), "reference_wav is empty"),
    "NaN": (wav_of(np.where(np.arange(SECOND.size) == 9, np.nan, SECOND).astype(np.float32)), "nan"),
    "infinite": (wav_of(np.where(np.arange(SECOND.size) == 9, np.inf, SECOND).astype(np.float32)), "inf"),
    "silence": (wav_of(np.zeros_like(SECOND)), "silen"),
    "silence before the padding": (
        {
            "reference_wav": np.concatenate([0 * SECOND, SECOND])[None],
            "reference_wav_len": np.array([[16_000]], np.int32),
        },
        "silen",
    ),
    "too short": (wav_of(SECOND[:7_900]), "0.49"),
    "too long": (wav_of(NOISE), "31"),
    "length beyond the array": (
        {"reference_wav": SECOND[None], "reference_wav_len": np.array([[16_001]], np.int32)},
        "16001",
    ),
    "length zero": (
        {"reference_wav": SECOND[None], "reference_wav_len": np.array([[0]], np.int32)},
        "reference_wav_len 0 ",
    ),
    "length negative": (
        {"reference_wav": SECOND[None], "reference_wav_len": np.array([[-5]], np.int32)},
        "reference_wav_len -5 ",
    ),
    "wrong type": ({"reference_wav": SECOND[None].astype(np.float64)}, "FP64"),
    "wrong shape": ({"reference_wav": SECOND.reshape(1, 2, -1)}, "reference_wav"),
    "two lengths": ({"reference_wav_len": np.array([[16_000, 16_000]], np.int32)}, "reference_wav_len"),
    "unknown speaker": (NO_RECORDING | {"speaker": text_array("nobody")}, "unknown speaker 'nobody'; known speakers: "),
    "a path out of the folder": (NO_RECORDING | {"speaker": text_array("../anna")}, "unknown speaker '../anna'"),
    "two voices": ({"speaker": text_array("nobody")}, "speaker 'nobody' with a reference_wav"),
    "speaker with a transcript": (
        NO_RECORDING | {"speaker": text_array("nobody"), "reference_text": text_array("words")},
        "reference_text 'words'",
    ),
    "instruction and transcript": (
        {"instruct_text": text_array("sadly")},
        "instruct_text 'sadly' with the reference_text",
    ),
    "instruction of control tokens": (
        {"instruct_text": text_array("<|endofprompt|>"), "reference_text": REMOVED},
        "instruct_text has nothing to speak",
    ),
    "too long a text": ({"target_text": text_array("word " * 1000)}, "5000 characters"),
}
BAD_PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "cross_lingual with a transcript": ({"cross_lingual": True}, "cross_lingual with the reference_text"),
    "cross_lingual that is no flag": ({"cross_lingual": "perhaps"}, "cross_lingual must be true or false"),
    "text_frontend that is no flag": ({"text_frontend": 3}, "text_frontend must be true or false"),
}


def bad_request(name: str, voice: np.ndarray) -> dict[str, np.ndarray]:
    changed = request_arrays(voice) | BAD_REQUESTS[name][0]
    return {key: value for key, value in changed.items() if value is not REMOVED}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_with_its_value_and_the_next_one_is_served(
    stack: str, name: str, serve: Serve, voice: np.ndarray
) -> None:
    address, model = serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack]
    answer = send(address, model, bad_request(name, voice))  # it returns, so the server has ended the request
    assert answer.error is not None and BAD_REQUESTS[name][1] in answer.error
    assert answer.waveform.size == 0
    assert send(address, model, request_arrays(voice)).error is None


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_a_bad_parameter_is_refused_with_its_value(stack: str, name: str, serve: Serve, voice: np.ndarray) -> None:
    parameters, named = BAD_PARAMETERS[name]
    answer = send(serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack], request_arrays(voice), parameters)
    assert answer.error is not None and named in answer.error


def test_a_stream_ends_with_exactly_one_final_response(stack: str, serve: Serve, voice: np.ndarray) -> None:
    """As upstream's client sees it: one long-lived stream that requests an empty final response."""
    arrivals: queue.Queue[tuple[Any, Any]] = queue.Queue()
    finals, sizes = 0, []
    with triton.InferenceServerClient(serve(stack=stack, settings=SETTINGS).grpc_url) as connection:
        connection.start_stream(lambda result, error: arrivals.put((result, error)))
        inputs = inputs_of(request_arrays(voice))
        connection.async_stream_infer(MODELS[stack], inputs, enable_empty_final_response=True)
        while not finals:
            result, error = arrivals.get(timeout=30)
            assert error is None
            finals += result.get_response().parameters["triton_final_response"].bool_param
            waveform = result.as_numpy("waveform")
            sizes.append(0 if waveform is None else waveform.size)
        connection.stop_stream()  # returns when no response is outstanding
    assert arrivals.empty()
    assert all(sizes[:-1]) and sizes[-1] == 0


# --- concurrent requests ---------------------------------------------------------------------------------------------


def eight_requests(voice: np.ndarray) -> list[Utterance]:
    """Different voices (recordings, excerpts, speeds), texts and seeds; every second one cross-lingual."""
    other = read_reference(samples.FOLDER / "reference_zh.wav")
    recordings = [voice, other, voice[: 2 * PROMPT_SAMPLE_RATE], other[PROMPT_SAMPLE_RATE:]]
    recordings += [at_rate(recording, 14_000 + 500 * index) for index, recording in enumerate(recordings)]
    return [
        Utterance(f"Sentence {index} " + "goes on " * index, wav, None if index % 2 else VOICE_TEXT, {"seed": index})
        for index, wav in enumerate(recordings)
    ]


def test_eight_concurrent_streams_equal_the_same_streams_alone(stack: str, serve: Serve, voice: np.ndarray) -> None:
    address, model = serve(stack=stack, settings=SETTINGS).grpc_url, MODELS[stack]
    utterances = eight_requests(voice)
    alone = [stream(address, model, utterance) for utterance in utterances]

    async def at_once() -> list[SpeechResult]:
        return await asyncio.gather(
            *(grpc_client.synthesize(address, model, utterance, timeout=120.0) for utterance in utterances)
        )

    together = asyncio.run(at_once())
    for one, other in zip(alone, together, strict=True):
        assert one.waveform.shape == other.waveform.shape
        np.testing.assert_allclose(one.waveform, other.waveform, atol=1e-3)
    assert len({speech.waveform.tobytes() for speech in alone}) == len(alone)


@pytest.mark.parametrize("stack", ["dit"], indirect=True)
def test_cancelled_streams_leave_no_thread_behind(stack: str, serve: Serve, voice: np.ndarray) -> None:
    server = serve(stack=stack, settings=SETTINGS)
    status = Path(f"/proc/{process_of(server, MODELS['dit'])}/status")
    long = Utterance("word " * 100, voice, VOICE_TEXT)

    async def cancel_after_the_first_chunk() -> None:
        async with grpc_client.triton.InferenceServerClient(server.grpc_url) as connection:
            async for _ in grpc_client.chunks(connection, MODELS[stack], long, 60.0):
                break

    def threads() -> int:
        return int(status.read_text().partition("Threads:")[2].split()[0])

    asyncio.run(cancel_after_the_first_chunk())  # threads that start once have started now
    before = threads()
    pool = min(32, (os.cpu_count() or 1) + 4)  # asyncio starts threads for blocking work one by one and keeps them
    for _ in range(pool + 20):
        asyncio.run(cancel_after_the_first_chunk())
    deadline = time.monotonic() + 60
    while threads() > before + pool + 2:  # the last threads may still be ending
        assert time.monotonic() < deadline, f"{before} threads have become {threads()}"
        time.sleep(0.1)


@pytest.mark.parametrize("stack", ["dit"], indirect=True)
def test_cancelling_many_long_texts_leaves_every_process_alive(stack: str, serve: Serve, voice: np.ndarray) -> None:
    """When each is cancelled, the LLM is generating ahead. As a call between models this damaged the heap or blocked
    the whole server, see common/cosyvoice_triton/triton_io/streams.py."""
    server = serve(stack=stack, settings=SETTINGS)
    address, before = server.grpc_url, server.model_processes()
    long = Utterance("word " * 100, voice, VOICE_TEXT)

    async def cancel_after(chunks: int) -> None:
        async with grpc_client.triton.InferenceServerClient(address) as connection:
            async with aclosing(grpc_client.chunks(connection, MODELS[stack], long, 60.0)) as waveforms:
                for _ in range(chunks):
                    await anext(waveforms)

    async def four_at_once() -> None:
        await asyncio.gather(*map(cancel_after, (1, 2, 3, 4)))

    for _ in range(8):
        asyncio.run(four_at_once())
    assert server.model_processes() == before
    assert_speech(stream(address, MODELS[stack], Utterance(TEXT, voice, VOICE_TEXT), timeout=20))


def test_cancelled_streams_free_their_slots(stack: str, serve: Serve, voice: np.ndarray) -> None:
    """More than token2wav has slots. Streams without a slot wait, so those that kept their slots would block the
    last."""
    server = serve(stack=stack, settings=SETTINGS)
    long, short = Utterance("word " * 100, voice, VOICE_TEXT), Utterance(TEXT, voice, VOICE_TEXT)

    async def cancel_then_finish(cancelled: int) -> SpeechResult:
        """Streams cancelled after their first chunk, then a complete one."""
        for _ in range(cancelled):
            async with grpc_client.triton.InferenceServerClient(server.grpc_url) as connection:
                async with aclosing(grpc_client.chunks(connection, MODELS[stack], long, 30.0)) as waveforms:
                    assert (await anext(waveforms)).waveform.size
        return await grpc_client.synthesize(server.grpc_url, MODELS[stack], short, timeout=30)

    async def run_all() -> list[SpeechResult]:
        cancelled = (3, 4, 5, 6)
        assert sum(cancelled) > 2 * STREAMS
        return await asyncio.gather(*map(cancel_then_finish, cancelled))

    for speech in asyncio.run(run_all()):
        assert_speech(speech)
