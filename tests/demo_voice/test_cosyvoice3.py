"""CosyVoice3's networks, trained for seconds on noise, are served as its stack."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton import Speaker, stacks
from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.llm.checkpoint import follows_instructions
from cosyvoice_triton.llm.engines.interface import candidate_ids
from cosyvoice_triton.llm.interface import LLMPrompt
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.networks.speech_tokenizer import load_speech_tokenizer
from cosyvoice_triton.prepare import demo, steps
from cosyvoice_triton.stacks import COSYVOICE3
from cosyvoice_triton.voice.silent_tokens import silent_tokens

from demo_voice.training import export, flow, flow_cosyvoice3, llm, llm_data, speaker, tokenizer
from tests.demo_voice.conftest import write_noise
from tests.support.server_requests import VOICE, VOICE_TEXT

pytestmark = pytest.mark.slow

TEXT = "Good morning to all of you."
LLMS = (stacks.COSYVOICE2_LLM, stacks.COSYVOICE3_LLM)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with all that the stack has, exported."""
    work = tmp_path_factory.mktemp("work")
    write_noise(work)
    small = {
        tokenizer: {"BATCH": 2},
        speaker: {"ROWS": 1},
        flow: {"BATCH_TOKENS": 60},
        llm_data: {"BATCH_TOKENS": 500},
        llm: {"WORKERS": 0},
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, sizes in small.items():
            for name, size in sizes.items():
                patch.setattr(module, name, size)
        for stage in (tokenizer, speaker, flow_cosyvoice3, llm):
            stage.train(work, 1.0, "cpu")
    export.export(work, work / "checkpoint")
    (work / "checkpoint" / demo.CARD).write_text("a card")
    return work


def test_the_llm_is_trained_on_the_prompts_of_both_versions(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_data, "UTTERANCES", (1,))
    monkeypatch.setattr(llm_data, "UTTERANCES_SHARE", (1.0,))
    versions = [LLMTokenizer.from_dir(trained / "checkpoint" / each.directory) for each in LLMS]
    assert [version.rules for version in versions] == [each.tokenizer for each in LLMS]
    for ids in map(candidate_ids, versions):
        assert len(ids) == ids[-1] - ids[0] + 1, "the end tokens follow the speech tokens"
    assert not any(follows_instructions(trained / "checkpoint" / each.directory) for each in LLMS)
    speech, text = np.arange(20), np.array(versions[0].text_ids(TEXT))
    labels = np.arange(80, dtype=np.uint8).reshape(20, 4)
    data = llm_data.Utterances([[text]], [], np.zeros(1), [speech], [speech[:0]], [labels])
    sequences, rng = llm_data.Sequences(data, versions[1].tokenizer, np.zeros(1, int), 0), np.random.default_rng(0)
    drawn = [sequences.random_sequence(rng) for _ in range(20)]
    expected = {tuple(version.encode_prompt(LLMPrompt(TEXT))): version for version in versions}
    assert {tuple(ids[~target]) for ids, target, *_ in drawn} == expected.keys() and len(expected) == 2
    for ids, target, places, phones in drawn:
        version = expected[tuple(ids[~target])]
        assert ids[target].tolist() == [*version.to_llm_ids(speech), version.end_ids[0]]
        assert (phones[target][:-1] == labels).all() and phones[~target].max() == llm_data.UNKNOWN_PHONE
        first, last = places[target][[0, -2]].round().astype(int)
        assert (ids[first], ids[last]) == (text[0], text[-1]) and last - first == len(text) - 1
        assert places[~target].max() == places[-1] == llm_data.ABSENT


def test_a_text_is_read_in_several_ways_that_say_the_same(trained: Path) -> None:
    tokenizer = LLMTokenizer.from_dir(trained / "checkpoint" / LLMS[1].directory).tokenizer
    (ways,) = llm_data.encoded(tokenizer, ["the quick brown fox jumps over the lazy dog."], " ")
    assert len(ways) == llm_data.READINGS and max(map(len, ways[1:])) > len(ways[0])
    assert {tokenizer.decode(ids).lower() for ids in ways} == {" the quick brown fox jumps over the lazy dog."}
    (again,) = llm_data.encoded(tokenizer, ["the quick brown fox jumps over the lazy dog."], " ")
    assert again[0].tolist() == ways[0].tolist(), "serving leaves no merges out"


def test_the_stack_speaks_with_what_was_trained(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRAINED", trained / "checkpoint")
    monkeypatch.setattr(steps, "STACKS", stacks.BUILT_IN)
    models = tmp_path / "models"
    assert steps.demo(models, COSYVOICE3.name)
    settings = {"max_streams": "2", "profile": "unlimited"}
    copied, stored = (list(folder.glob("*_llm/model.safetensors")) for folder in (models, demo.TRAINED))
    assert (len(copied), len(stored)) == (2, 1) and {path.read_bytes() for path in copied} == {stored[0].read_bytes()}
    served = load_speech_tokenizer(models / COSYVOICE3.checkpoint / COSYVOICE3.speech_tokenizer).state_dict()
    for name, tensor in tokenizer.load(trained, "cpu").state_dict().items():
        assert torch.equal(served[name], tensor), "as the training tokens were made"
    assert silent_tokens(models / COSYVOICE3.checkpoint, COSYVOICE3) != COSYVOICE3.silent_tokens
    with Speaker(models, stack=COSYVOICE3.name, device="cpu", settings=settings) as spoken:
        for voice in ({"voice": export.DEMO_VOICES[0]}, {"reference": VOICE, "reference_text": VOICE_TEXT}):
            options = {**voice, "seed": 3, "trim_silence": "off"}
            chunks = list(spoken.stream(TEXT, **options))
            assert len(chunks) > 1 and all(np.isfinite(chunk).all() for chunk in chunks)
            whole = spoken.speak(TEXT, **options)
            assert whole.size == sum(map(len, chunks)) and whole.size % (SAMPLE_RATE // TOKEN_RATE) == 0
