"""The official layout of the LLM and the HuggingFace directory converted from it: equal logits with random weights."""

import json

import numpy as np
import pytest
import torch
from cosyvoice_triton.cli.convert_llm import main
from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.llm.checkpoint import read_head_bias, speech_bias
from cosyvoice_triton.llm.engines.genai import GenAIModel
from cosyvoice_triton.llm.engines.interface import candidate_ids
from cosyvoice_triton.llm.interface import LLMPrompt
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.prepare import genai
from cosyvoice_triton.prepare.huggingface_llm import COSYVOICE3_LLM, TEXT_SPECIALS
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from tests.support.official_llm import HIDDEN, SPEECH_LOGITS, official_llm, write_blank


@pytest.fixture(scope="module")
def blank_dir(tmp_path_factory):
    return write_blank(tmp_path_factory.mktemp("official") / "CosyVoice-BlankEN")


@pytest.fixture(scope="module")
def official_state(blank_dir):
    return official_llm(blank_dir)


def convert(state, blank_dir, folder, name="llm.pt"):
    """The exit code of the conversion of such a checkpoint to folder / "hf"."""
    torch.save(state, folder / name)
    arguments = ["--llm-pt", str(folder / name), "--blank-dir", str(blank_dir), "--dtype", "float32"]
    return main([*arguments, "--output-dir", str(folder / "hf")])


@pytest.fixture(scope="module")
def converted(blank_dir, official_state):
    assert convert(official_state, blank_dir, blank_dir.parent) == 0
    return blank_dir.parent / "hf"


def official_logits(state, blank_dir, text_ids, speech):
    """Logits (SPEECH_LOGITS,) as CosyVoice2 computes them, with separate embeddings and a biased output layer."""
    prefix = "llm.model.model."
    model = Qwen2Model(Qwen2Config.from_pretrained(blank_dir)).eval()
    model.load_state_dict({name.removeprefix(prefix): w for name, w in state.items() if name.startswith(prefix)})
    marks, text = state["llm_embedding.weight"], state[f"{prefix}embed_tokens.weight"][text_ids]
    embedded = torch.cat([marks[:1], text, marks[1:], state["speech_embedding.weight"][speech]])
    with torch.no_grad():
        hidden = model(inputs_embeds=embedded[None]).last_hidden_state[0, -1]
    return hidden @ state["llm_decoder.weight"].T + state["llm_decoder.bias"]


@pytest.mark.slow
def test_both_layouts_give_equal_logits(converted, official_state, blank_dir, tmp_path):
    tokenizer = LLMTokenizer.from_dir(converted)
    speech = [5, 6560, 17]
    ids = tokenizer.encode_prompt(LLMPrompt("Hello", "a voice", speech)).tolist()
    expected = official_logits(official_state, blank_dir, ids[1 : ids.index(tokenizer.task_id)], speech)
    speech_rows = slice(tokenizer.first_speech_id, tokenizer.first_speech_id + SPEECH_LOGITS)
    with torch.no_grad():
        logits = Qwen2ForCausalLM.from_pretrained(converted, dtype=torch.float32)(torch.tensor([ids])).logits[0, -1]
    found = logits[speech_rows].numpy() + read_head_bias(converted)[speech_rows]
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)
    genai.convert(converted, tmp_path / "genai", "fp32")
    model = GenAIModel(tmp_path / "genai", rows=1, threads=1)
    np.testing.assert_allclose(model.prefill(0, np.array(ids)), expected.numpy(), atol=2e-4)


def test_the_tokenizer_has_the_official_ids_after_those_of_the_text(converted):
    tokenizer = LLMTokenizer.from_dir(converted)
    ids = tokenizer.tokenizer.token_to_id
    first, end = tokenizer.first_speech_id, tokenizer.first_speech_id + SPEECH_LOGITS
    assert first == 256 + 1 + len(TEXT_SPECIALS) and [*map(ids, TEXT_SPECIALS)] == list(range(257, first))
    assert tokenizer.end_ids == tuple(range(first + SPEECH_VOCAB, end))
    assert (tokenizer.sos_id, tokenizer.task_id) == (end, end + 1)
    config = json.loads((converted / "config.json").read_text())
    assert config["vocab_size"] % 128 == 0 and config["vocab_size"] > tokenizer.task_id
    assert (config["eos_token_id"], config["tie_word_embeddings"]) == (list(tokenizer.end_ids), False)


@pytest.fixture(scope="module")
def cosyvoice3_state(official_state):
    """The same Qwen2 in CosyVoice3's layout."""
    qwen2 = {name: tensor for name, tensor in official_state.items() if name.startswith("llm.model.")}
    return qwen2 | {name: torch.randn(shape) for name, shape in COSYVOICE3_LLM.shapes(HIDDEN).items()}


def test_cosyvoice3_has_its_own_tokens_and_nothing_else_can_be_sampled(blank_dir, cosyvoice3_state, tmp_path):
    """tests/assets/golden_cosyvoice3 has upstream's logits of such a conversion."""
    assert convert(cosyvoice3_state, blank_dir, tmp_path, "llm.rl.pt") == 0
    tokenizer = LLMTokenizer.from_dir(tmp_path / "hf")
    first, ids = tokenizer.first_speech_id, tokenizer.tokenizer.token_to_id
    assert first == 256 + 3 + 278  # the new text tokens, as in the official vocabulary
    named = ("<|sos|>", "<|eos1|>", "<|task_id|>", "<|fill|>", "<|s_6565|>", "<|s_6760|>")
    assert [ids(token) - first for token in named] == [6561, 6562, 6563, 6564, 6565, 6760]
    assert tokenizer.end_ids[0] == first + 6562 and sorted(tokenizer.end_ids) == list(range(first + 6561, first + 6761))
    vocab = json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"]
    allowed = np.flatnonzero(np.isfinite(speech_bias(tmp_path / "hf", tokenizer, vocab)))
    assert (allowed == np.arange(first, first + 6761)).all() and (allowed == candidate_ids(tokenizer)).all()
    phonemes = tokenizer.tokenizer.encode("报道[j][ǐ]予[breath][AH0]", add_special_tokens=False).tokens
    assert {"[j]", "[ǐ]", "[breath]", "[AH0]"} <= {*phonemes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llm_decoder.bias": None}, "missing: llm_decoder.bias"),
        ({"extra": torch.zeros(1)}, "unexpected: extra"),
        ({"speech_embedding.weight": torch.zeros(4096, HIDDEN)}, "mismatched: speech_embedding.weight is [4096, 64]"),
    ],
)
def test_a_checkpoint_with_other_keys_is_refused(official_state, blank_dir, tmp_path, capsys, change, message):
    state = {name: tensor for name, tensor in (official_state | change).items() if tensor is not None}
    assert convert(state, blank_dir, tmp_path) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["llm.pt"]


def test_code_in_a_checkpoint_is_not_executed(blank_dir, tmp_path, capsys):
    assert convert({"llm_decoder.bias": print}, blank_dir, tmp_path) == 1
    assert "is not a file of tensors" in capsys.readouterr().err
