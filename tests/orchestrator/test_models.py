"""`cosyvoice2` and `cosyvoice2_dit` as Triton loads them, over fakes of the other models."""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout  # before Python 3.11 not the built-in one
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SPEAKER_DIM, SPEECH_VOCAB
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.checkpoint import follows_instructions
from cosyvoice_triton.llm.speech_tokens import COSYVOICE2, LLMTokenizer
from cosyvoice_triton.text import frontend
from cosyvoice_triton.text.kana import MISSING
from cosyvoice_triton.triton_io import origin, read_all, to_response
from cosyvoice_triton.voice.files import save_pronunciation, save_voice
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.conftest import ROOT, initialized_model
from tests.support import fake_triton
from tests.support.fake_triton import Callee, InferenceRequest, InferenceResponse, TritonError
from tests.support.fakes import PROMPT_TOKENS, fake_prompt
from tests.support.waiting import until

MODEL_FILES = {
    "cosyvoice2": ROOT / "model_repo/cosyvoice2/1/model.py",
    "cosyvoice2_dit": ROOT / "model_repo_dit/cosyvoice2_dit/1/model.py",
}
FIRST_SPEECH_ID = 10  # in this vocabulary
EOS = 3
START = fake_triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
TOKENS = 100  # of every answer of the LLM
PROMPT = 25  # speech tokens of one second
DOWN = "http://127.0.0.1:9"  # nobody listens there
WAV = 0.9 * np.sin(np.arange(PROMPT_SAMPLE_RATE, dtype=np.float32))
WAV[-PROMPT_SAMPLE_RATE // 20 :] = 0  # a pause, without which it is judged to be cut
pytestmark = pytest.mark.usefixtures("triton_grpc")


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["[UNK]", "<|sos|>", "<|task_id|>", "<|eos1|>", COSYVOICE2.end_of_prompt]
    words += [f"word{i}" for i in range(len(words), FIRST_SPEECH_ID)]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<|s_{i}|>" for i in range(SPEECH_VOCAB))])}
    directory = tmp_path_factory.mktemp("tokenizer")
    Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")).save(str(directory / "tokenizer.json"))
    return directory


@dataclass
class FakeModels:
    """The other models, and orchestrators over them.

    The LLM generates 0..99; token2wav's audio is one sample per token: 1000 x voice + token.

    `pause`: seconds that the LLM takes for each token.
    """

    tokenizer_dir: Path
    pause: float = 0.0
    token2wav_fails: bool = False
    llm_tokens: int = TOKENS
    llm_requests: list[dict[str, np.ndarray]] = field(default_factory=list)
    sequences: dict[int, float] = field(default_factory=dict)  # live ones: correlation id -> voice
    ended: list[int] = field(default_factory=list)

    @contextmanager
    def started(self, name: str = "cosyvoice2_dit", decoupled: bool = True, **settings: str) -> Iterator[Any]:
        """The model of that name, initialized; finalized at the end."""
        instances = 1 + decoupled  # neither serves a text in pieces
        given = {"model_dir": "unused", "llm_tokenizer_dir": str(self.tokenizer_dir)} | settings
        model = initialized_model(MODEL_FILES[name], decoupled, instances, **given)
        try:
            yield model
        finally:
            model.finalize()

    def answer(self, *requests: InferenceRequest, **how: Any) -> None:
        """Serve the requests one after another by a model that is started for them."""
        with self.started(**how) as model:
            for request in requests:
                serve(model, request)

    def audio_tokenizer(self, request: InferenceRequest) -> InferenceResponse:
        assert read_all(request)["reference_wav"].shape[1] == read_all(request)["reference_wav_len"].item()
        tokens = np.arange(FIRST_SPEECH_ID, FIRST_SPEECH_ID + PROMPT, dtype=np.int32)
        return to_response({"prompt_speech_tokens": tokens[None]})

    def speaker_embedding(self, request: InferenceRequest) -> InferenceResponse:
        voice = read_all(request)["reference_wav"].max().round()
        return to_response({"prompt_spk_embedding": np.full((1, SPEAKER_DIM), voice, np.float16)})

    def llm(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        self.llm_requests.append(read_all(request))
        tokens = range(FIRST_SPEECH_ID, FIRST_SPEECH_ID + self.llm_tokens)
        for token in [*tokens, EOS]:
            time.sleep(self.pause)
            yield to_response(
                {"output_ids": np.array([[[token]]], np.int32), "sequence_length": np.array([[1]], np.int32)}
            )

    def token2wav(self, request: InferenceRequest) -> InferenceResponse:
        inputs, of = read_all(request), origin(request)
        sequence = of["correlation_id"]
        if of["start"]:
            assert sequence not in self.sequences
            self.sequences[sequence] = 0.0
        elif sequence not in self.sequences:  # its end may overtake what was asked before
            return InferenceResponse(error=TritonError(f"sequence {sequence} is not live", TritonError.INVALID_ARG))
        if "prompt_spk_embedding" in inputs:
            self.sequences[sequence] = float(inputs["prompt_spk_embedding"][0, 0])
        voice = self.sequences[sequence]
        if of["end"]:
            del self.sequences[sequence]
            self.ended.append(sequence)
        tokens = inputs["target_speech_tokens"][0] - FIRST_SPEECH_ID
        if "finalize" in inputs:
            if self.token2wav_fails and len(tokens):
                return InferenceResponse(error=TritonError("out of memory", TritonError.UNAVAILABLE))
            offset = inputs["token_offset"].item() if "token_offset" in inputs else 0
            tokens = tokens[offset:] if inputs["finalize"].item() else tokens[offset : max(offset, len(tokens) - 3)]
        return to_response({"waveform": (1000 * voice + tokens)[None].astype(np.float32)})


def client_request(
    decoupled: bool = True, parameters: Mapping[str, Any] | None = None, **inputs: Any
) -> InferenceRequest:
    texts = {"target_text": "word5.", "reference_text": "word6"}
    texts |= {name: text for name, text in inputs.items() if isinstance(text, str)}
    tensors = {name: np.array([[text.encode()]], object) for name, text in texts.items()}
    if inputs.get("reference_wav", WAV) is not None:
        tensors["reference_wav"] = WAV[None]
        tensors["reference_wav_len"] = np.array([[inputs.get("length", len(WAV))]], np.int32)
    if "rate" in inputs:
        tensors["reference_sample_rate"] = np.array([[inputs["rate"]]], np.int32)
    sequence = {"correlation_id": inputs.get("sequence", 0), "flags": START}
    return InferenceRequest.from_client(tensors, parameters=parameters, decoupled=decoupled, **sequence)


def serve(model: Any, *requests: InferenceRequest) -> None:
    assert model.execute(list(requests)) is None
    until(lambda: all(request.sender.final for request in requests))


def audio(request: InferenceRequest) -> np.ndarray:
    """(N,) of all responses."""
    return np.concatenate([response.arrays()["waveform"] for response in request.sender.responses], axis=1)[0]


def failure(request: InferenceRequest) -> tuple[int, str]:
    """Code and message of the error that ended a request."""
    error = request.sender.responses[-1].error()
    assert error is not None
    return error.code(), error.message()


@pytest.fixture
def models(tokenizer_dir: Path, triton_models: dict[str, Callee]) -> FakeModels:
    fakes = FakeModels(tokenizer_dir)
    triton_models |= {"audio_tokenizer": fakes.audio_tokenizer, "speaker_embedding": fakes.speaker_embedding}
    triton_models |= {"tensorrt_llm": fakes.llm, "token2wav": fakes.token2wav, "token2wav_dit": fakes.token2wav}
    return fakes


def responses(request: InferenceRequest) -> list[dict[str, np.ndarray]]:
    return [response.arrays() for response in request.sender.responses if response.arrays()]


def warnings(request: InferenceRequest) -> list[str]:
    return [outputs["warning"].item() for outputs in responses(request) if "warning" in outputs]


def prompts(models: "FakeModels") -> list[list[int]]:
    """The ids that the LLM was given."""
    return [request["input_ids"][0].tolist() for request in models.llm_requests]


@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize(("decoupled", "chunks"), [(True, 3), (False, 1)])
def test_every_token_is_heard_once(name: str, decoupled: bool, chunks: int, models: FakeModels) -> None:
    request = client_request(decoupled)
    models.answer(request, name=name, decoupled=decoupled)
    np.testing.assert_array_equal(audio(request), 1000 + np.arange(TOKENS))
    assert len(request.sender.responses) == chunks
    assert len(models.ended) == 1 and not models.sequences


def test_a_timeline_is_sent_only_if_the_request_asks_for_it(models: FakeModels) -> None:
    with_timeline, without = client_request(parameters={"timeline": True}), client_request()
    models.answer(with_timeline, without)
    timelines = [json.loads(outputs["timeline"].item()) for outputs in responses(with_timeline)]
    assert len(timelines) > 1, "a chunk's stages are sent with it"
    assert {stage for stage, _ in timelines[0]} == {"voice", "llm", "prompt_cache", "tokens", "audio"}
    times = [at for stages in timelines for _, at in stages]
    assert times == sorted(times) and times[0] >= 0
    assert all([stage for stage, _ in stages][-2:] == ["tokens", "audio"] for stages in timelines)
    assert not any({"timeline", "segments"} & outputs.keys() for outputs in responses(without))


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_segments_are_sent_with_their_samples(models: FakeModels, decoupled: bool) -> None:
    request = client_request(decoupled, {"segments": True})
    models.answer(request, decoupled=decoupled)
    *others, last = responses(request)
    ((_, samples),) = json.loads(last["segments"].item())
    assert samples == audio(request).size == TOKENS
    assert not any("segments" in outputs for outputs in others)


def test_settings_of_the_model_and_parameters_of_the_request_reach_the_llm(models: FakeModels) -> None:
    parameters = {"top_k": 5, "seed": 11, "triton_enable_empty_final_response": True}
    models.answer(client_request(parameters=parameters), sampling="triton", max_tokens="12")
    (llm,) = models.llm_requests
    names = ("temperature", "runtime_top_k", "request_output_len", "min_length", "random_seed")
    assert [llm[name].item() for name in names] == [pytest.approx(0.8), 5, 12, 4, 11]
    # <|sos|> the texts <|task_id|> and the prompt's tokens
    assert llm["input_ids"][0, -PROMPT:].tolist() == list(range(FIRST_SPEECH_ID, FIRST_SPEECH_ID + PROMPT))


def test_a_registered_voice_and_an_instruction_reach_the_llm_and_token2wav(models: FakeModels, tmp_path: Path) -> None:
    save_voice(tmp_path / "anna.safetensors", fake_prompt(2, "word7"))
    by_name = client_request(reference_wav=None, speaker="anna", reference_text="")
    by_default = client_request(reference_wav=None, reference_text="", instruct_text="word8")
    models.answer(by_name, by_default, voices_dir=str(tmp_path), default_speaker="anna")
    for request in (by_name, by_default):
        np.testing.assert_array_equal(audio(request), 2000 + np.arange(TOKENS))
    zero_shot, instructed = prompts(models)
    assert zero_shot[-PROMPT_TOKENS:] == [FIRST_SPEECH_ID + 2] * PROMPT_TOKENS
    assert instructed[-1] == LLMTokenizer.from_dir(models.tokenizer_dir).task_id


def test_an_llm_that_does_not_follow_instructions_never_gets_one(models: FakeModels, tmp_path: Path) -> None:
    shutil.copytree(models.tokenizer_dir, tmp_path / "llm")
    (tmp_path / "llm" / "config.json").write_text('{"follows_instructions": false}')
    save_voice(tmp_path / "anna.safetensors", fake_prompt(2, "word7"))
    asked, plain = (
        client_request(reference_wav=None, speaker="anna", reference_text="", instruct_text=words)
        for words in ("word8", "")
    )
    models.answer(asked, plain, llm_tokenizer_dir=str(tmp_path / "llm"), voices_dir=str(tmp_path))
    first, second = prompts(models)
    assert first == second and warnings(asked) == ["instruct_text was left out: this LLM does not follow instructions"]
    assert not follows_instructions(ROOT / "common/cosyvoice_triton/demo_checkpoint/trained/cosyvoice2_llm")


def test_words_of_the_request_the_voice_and_the_folder_are_pronounced(models: FakeModels, tmp_path: Path) -> None:
    save_voice(tmp_path / "anna.safetensors", fake_prompt(2, "word7"))
    save_pronunciation(tmp_path, "anna", {"a": "voice", "b": "voice"})
    (tmp_path / "pronunciation.txt").write_text("a = all\nb = all\nc = all")
    words = {"segments": True, "pronunciation": '{"a": "request"}'}
    anna = {"reference_wav": None, "reference_text": "", "speaker": "anna"}
    by_name, by_recording = (client_request(parameters=words, target_text="A b c.", **voice) for voice in (anna, {}))
    models.answer(by_name, by_recording, voices_dir=str(tmp_path))
    spoken = [json.loads(responses(request)[-1]["segments"].item())[0][0] for request in (by_name, by_recording)]
    assert spoken == ["request voice all.", "request all all."]
    (tmp_path / "pronunciation.txt").write_text("nginx")
    with pytest.raises(UnavailableError, match=r"pronunciation\.txt, line 1: 'nginx' is not"):  # when it is loaded
        models.answer(voices_dir=str(tmp_path))


def test_kanji_that_cosyvoice3_cannot_read_are_warned_of_at_start_and_in_the_answer(models, monkeypatch, caplog):
    monkeypatch.setattr(frontend, "kana_available", lambda: False)
    kanji, kana = (client_request(target_text=text) for text in ("今日は雨です。", "きょうはあめです。"))
    models.answer(kanji)
    assert MISSING not in caplog.text and not warnings(kanji)
    monkeypatch.setattr(stacks, "DIT", dataclasses.replace(stacks.DIT, name="cosyvoice3"))
    kanji = client_request(target_text="今日は雨です。")
    models.answer(kanji, kana)
    assert caplog.text.count(MISSING) == 1 and warnings(kanji) == [MISSING]
    assert "warning" in responses(kanji)[0] and not warnings(kana)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default_speaker": "bert"}, "unknown speaker 'bert'; known speakers: anna"),
        ({"default_speaker": "damaged"}, "speaker 'damaged' cannot be used"),
        ({"max_hop_tokens": "60"}, "largest hop of 60"),
    ],
)
def test_settings_that_cannot_be_used_stop_the_model_from_loading(settings, message, models, tmp_path) -> None:
    save_voice(tmp_path / "anna.safetensors", fake_prompt(2))
    if settings.get("default_speaker") == "damaged":
        (tmp_path / "damaged.wav").write_bytes(b"no audio")
    with pytest.raises((ValueError, UnavailableError), match=message):
        models.answer(name="cosyvoice2", voices_dir=str(tmp_path), **settings)


def test_a_tag_of_another_server_is_left_out_with_a_warning(models: FakeModels) -> None:
    tagged, plain = (client_request(target_text=text) for text in ("[happy:0.5] word7", "word7"))
    models.answer(tagged, plain)
    first, second = prompts(models)
    assert first == second and warnings(tagged) == ["tags were left out, as they mean nothing here: [happy:0.5]"]


def test_the_chunk_strategy_is_a_setting(models: FakeModels) -> None:
    request = client_request()
    models.answer(request, dynamic_chunk_strategy="equal", first_hop_tokens="20")
    assert [outputs["waveform"].shape[1] for outputs in responses(request)] == [20] * 5


def test_runs_of_the_stacks_silent_tokens_are_shortened(models: FakeModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "DIT", dataclasses.replace(stacks.DIT, silent_tokens=frozenset(range(10, 16))))
    request = client_request()
    models.answer(request)
    assert np.setdiff1d(np.arange(TOKENS), audio(request) % 1000).tolist() == [15]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"length": 10**6}, "reference_wav_len 1000000"),
        ({"sequence": 5}, "sequence id 5: a request in pieces is not served with"),
        ({"parameters": {"language": "de"}}, "language 'de' is not one of auto, zh, en, ja, ko"),
    ],
)
def test_bad_input_is_the_callers_error_and_the_next_request_is_served(decoupled, inputs, message, models) -> None:
    bad, good = client_request(decoupled, **inputs), client_request(decoupled)
    models.answer(bad, good, decoupled=decoupled)
    assert failure(bad)[0] == TritonError.INVALID_ARG and message in failure(bad)[1]
    assert "ko, de" not in failure(bad)[1]  # which this stack does not speak
    assert len(audio(good)) == TOKENS


@pytest.mark.parametrize(
    ("fault", "settings", "code", "message"),
    [
        ({"token2wav_fails": True}, {}, TritonError.UNAVAILABLE, "out of memory"),
        ({"llm_tokens": 0}, {}, TritonError.INVALID_ARG, "the LLM returned no speech token for the text 'word five.'"),
        ({}, {"llm_transport": "openai", "llm_urls": DOWN}, TritonError.UNAVAILABLE, DOWN),
    ],
)
def test_a_failing_model_fails_the_request_and_leaves_no_sequence(fault, settings, code, message, models) -> None:
    request = client_request()
    vars(models).update(fault)
    models.answer(request, **settings)
    assert failure(request)[0] == code and message in failure(request)[1]
    assert len(models.ended) <= 1  # the LLM may fail before one is started
    assert not models.sequences


def test_finalize_ends_live_requests_before_their_connections_and_closes_the_loop_in_any_case(models, monkeypatch):
    models.pause = 0.02
    request, ended = client_request(), []

    async def fail_to_close() -> None:
        ended.append(request.sender.final)
        raise RuntimeError("cannot close")

    with pytest.raises(RuntimeError, match="cannot close"), models.started() as model:
        monkeypatch.setattr(model._pipeline.llm, "aclose", fail_to_close)
        model.execute([request])
        until(lambda: bool(models.sequences))
    assert ended == [True]
    assert failure(request)[0] == TritonError.UNAVAILABLE and model._loop.loop.is_closed()


def test_a_blocked_loop_fails_the_models_own_test(models: FakeModels, monkeypatch: pytest.MonkeyPatch) -> None:
    free = Event()
    with models.started() as model:
        model._test()
        monkeypatch.setattr("cosyvoice_triton.orchestrator.model.TEST_SECONDS", 0.1)
        model._loop.loop.call_soon_threadsafe(free.wait, 60)
        with pytest.raises(FutureTimeout):
            model._test()
        free.set()
