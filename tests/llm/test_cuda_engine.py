"""The engine cuda on a CPU: its network against transformers, its sampling against the definition, its memory."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from cosyvoice_triton.llm.engines.cuda.decoder import Decoder
from cosyvoice_triton.llm.engines.cuda.operations import FAULT, NOTHING, Plain, PromptPiece
from cosyvoice_triton.llm.engines.cuda.weights import Weights
from cosyvoice_triton.llm.engines.interface import GenerationRequest, candidate_ids
from cosyvoice_triton.llm.interface import Sampling
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from tests.support.llm_fixtures import load_engine

GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0}
RAS = {"temperature": 1.0, "top_p": 0.8, "top_k": 25, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def weights(llm_dir, tokenizer):
    """With a context of 256 tokens, four pages."""
    return weights_of(Weights.read(llm_dir, tokenizer, torch.device("cpu"), torch.float32))


def weights_of(read):
    return dataclasses.replace(read, sizes=dataclasses.replace(read.sizes, context=256))


class Observed:
    """Operations that keep the logits of each step."""

    def __init__(self, operations):
        self._operations, self.logits = operations, []

    def __getattr__(self, name):
        return getattr(self._operations, name)

    def head(self, x, weight, eps):
        self.logits.append(self._operations.head(x, weight, eps))
        return self.logits[-1]


class Scripted(Plain):
    """Whatever the network computes, the logits (C,) are 0 but for some columns."""

    def __init__(self, weights, columns):
        self._logits = torch.zeros(len(weights.bias))
        self._logits[list(columns)] = torch.tensor(list(columns.values()), dtype=torch.float32)

    def head(self, x, weight, eps):
        return self._logits.expand(len(x.x), -1)


class Slots:
    """A decoder, used without a scheduler: a request for each slot, with so many pages of its own."""

    def __init__(self, weights, requests, operations=None, prefill=256, pages=4, graphs=False):
        self.operations, count = operations or Observed(Plain()), len(requests)
        self.decoder = Decoder(weights, self.operations, count, pages * count + 1, prefill, graphs=graphs)
        self.decoder.set_block_tables({slot: range(pages * slot + 1, pages * (slot + 1) + 1) for slot in range(count)})
        for slot, request in enumerate(requests):
            ids = request.input_ids[:-1]
            for begin in range(0, len(ids), prefill):
                self.decoder.prefill([PromptPiece(slot, begin, ids[begin : begin + prefill])])
        self.decoder.fill_slots(dict(enumerate(requests)))
        self.set_batch(range(len(requests)))

    def set_batch(self, slots):
        self._rows = len(slots)
        self.decoder.set_batch(list(slots))

    def step(self, count=1):
        """(steps, rows)"""
        return np.concatenate([self.decoder.step(self._rows, 1).columns() for _ in range(count)])


def of_ids(ids, *, end_ids=(0,), **sampling):
    return GenerationRequest(np.array(ids, np.int64), Sampling(**sampling), end_ids)


def test_logits_and_greedy_tokens_equal_those_of_transformers(llm_dir, weights, tokenizer):
    """Prompts of several pages and of one token; prefilled in pieces, and computed together."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, weights.sizes.vocab, length).tolist() for length in (150, 1, 64, 65)]
    served = Slots(weights, [of_ids(ids, **GREEDY, max_tokens=70) for ids in prompts], prefill=40)
    found = served.step(70)  # across the ends of pages
    logits = torch.stack(served.operations.logits)  # (steps, rows, C)
    model = Qwen2ForCausalLM.from_pretrained(llm_dir, dtype=torch.float32)
    candidates = torch.from_numpy(candidate_ids(tokenizer))
    for row, ids in enumerate(prompts):
        answer = (found[:, row] + weights.first).tolist()
        with torch.no_grad():
            expected = model(torch.tensor([ids + answer[:-1]])).logits[0, len(ids) - 1 :]
        torch.testing.assert_close(logits[:, row], expected[:, candidates], atol=1e-4, rtol=1e-4)
        assert answer == candidates[expected[:, candidates].argmax(1)].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outliers_in_the_residual_stream_leave_the_logits_right(llm_dir, weights, tokenizer, dtype):
    """The engine computes in bfloat16, and in float16 on GPUs without it."""

    def logits(dtype):
        read = Weights.read(llm_dir, tokenizer, torch.device("cpu"), dtype)
        read.embedding[:, 0] = 6e4  # its square passes the range of float16
        for layer in read.layers:
            layer.down[0] = 100
            layer.gate_up[:] *= 10
        served = Slots(weights_of(read), [of_ids(range(9, 40), **GREEDY)])
        served.step()
        return served.operations.logits[0]

    exact, rounded = logits(torch.float32), logits(dtype)
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_the_bias_of_the_output_head_is_added(llm_dir, weights, tokenizer, tmp_path):
    shutil.copytree(llm_dir, tmp_path / "biased")
    tensors = load_file(llm_dir / "model.safetensors")
    bias = torch.randn(weights.sizes.vocab, generator=torch.Generator().manual_seed(0))
    bias[0] = 1000.0  # text is never drawn
    save_file(tensors | {"lm_head.bias": bias}, tmp_path / "biased" / "model.safetensors", metadata={"format": "pt"})
    biased = Weights.read(tmp_path / "biased", tokenizer, torch.device("cpu"), torch.float32)
    served = Slots(biased, [of_ids([7, 8], **GREEDY)])
    (column,) = served.step()[0]
    assert column == (served.operations.logits[0][0] + bias[candidate_ids(tokenizer)]).argmax()


def test_a_tied_output_head_is_the_embedding(llm_dir, tokenizer, tmp_path):
    shutil.copytree(llm_dir, tmp_path / "tied")
    tensors = load_file(llm_dir / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    head = Weights.read(tmp_path / "tied", tokenizer, torch.device("cpu"), torch.float32).head
    norm = tensors["model.norm.weight"]
    assert torch.equal(head, tensors["model.embed_tokens.weight"][candidate_ids(tokenizer)] * norm)


def test_a_row_ends_on_the_device_by_an_end_token_or_its_length(weights):
    """The end token of one request is any other token to another one; none is drawn before min_tokens."""
    end_ids = (weights.first + 7,)
    requests = [
        of_ids([7], **GREEDY, end_ids=end_ids),
        of_ids([7], **GREEDY, end_ids=end_ids, min_tokens=2),
        of_ids([7], **GREEDY, max_tokens=3),
    ]
    served = Slots(weights, requests, Scripted(weights, {7: 5.0, 9: 4.0}))
    assert served.step(5).T.tolist() == [[7] + [NOTHING] * 4, [9, 9, 7] + [NOTHING] * 2, [7] * 3 + [NOTHING] * 2]


def test_the_repetition_penalty_counts_prompt_and_drawn_tokens_of_the_slots_own_request(weights):
    penalised = of_ids([weights.first + 7], temperature=0, repetition_penalty=2.0)
    logits = Scripted(weights, {7: 4.0, 8: 3.0, 9: 2.5})
    served = Slots(weights, [penalised, of_ids([weights.first + 7], **GREEDY)], logits)
    assert served.step(3).T.tolist() == [[8, 9, 7], [7, 7, 7]]
    served.decoder.fill_slots({0: penalised})  # nothing of the slot's last request is left
    assert served.step(3).T.tolist() == [[8, 9, 7], [7, 7, 7]]


def test_a_request_with_other_end_tokens_ends_by_its_own(weights):
    served = Slots(weights, [of_ids([7], **GREEDY, end_ids=(weights.first + 7,))], Scripted(weights, {7: 5.0}))
    assert served.step(2).T.tolist() == [[7, NOTHING]]
    served.decoder.fill_slots({0: of_ids([7], **GREEDY, end_ids=(weights.first + 8,))})
    assert served.step(2).T.tolist() == [[7, 7]]
    served.decoder.fill_slots({0: of_ids([7], **GREEDY, end_ids=(weights.first + 7,))})
    assert served.step(2).T.tolist() == [[7, NOTHING]]


def test_what_the_pages_held_before_does_not_matter(weights):
    request = of_ids(list(range(100)), **GREEDY)
    clean, reused = Slots(weights, [request, request]), Slots(weights, [request, request])
    for page in range(1, 9):
        reused.decoder.invalidate(page)
    for slot in range(2):
        reused.decoder.prefill([PromptPiece(slot, 0, request.input_ids[:-1])])
    assert (reused.step(9) == clean.step(9)).all()


def test_a_row_whose_logits_are_not_finite_ends_alone(weights):
    requests = [of_ids([40, 50, 60], **sampling, seed=3) for sampling in (GREEDY, RAS, GREEDY)]
    whole, served = Slots(weights, requests), Slots(weights, requests)
    expected = whole.step(8)
    served.step(2)
    served.decoder.invalidate(5)  # of the second slot
    found = served.step(6)
    assert found[:, 1].tolist() == [FAULT] + [NOTHING] * 5
    assert (found[:, [0, 2]] == expected[2:, [0, 2]]).all()


def load(directory, tokenizer, gib, requests=2):
    return load_engine("cuda", directory, tokenizer, requests, llm_memory_gib=gib, instance_kind="KIND_CPU")


def test_memory_for_less_than_one_context_is_an_error_with_what_is_needed(llm_dir, weights, tokenizer):
    with pytest.raises(ValueError, match=r"llm_memory_gib 0.001 is too small: the LLM needs 0.0\d for one request"):
        load(llm_dir, tokenizer, 0.001)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "the engine cuda runs models of type qwen2, not 'llama'"),
        ({"num_hidden_layers": 3}, "not a complete Qwen2 network: its .* have no model.layers.2.self_attn.q_proj"),
        ({"intermediate_size": 260}, "intermediate_size 260 is not a multiple of 8"),
        ({"vocab_size": 500}, "vocabulary of 500, too small for the tokenizer's speech and end tokens"),
    ],
)
def test_another_model_is_an_error(llm_dir, tokenizer, tmp_path, change, message):
    shutil.copy(llm_dir / "model.safetensors", tmp_path)
    config = json.loads((llm_dir / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tokenizer, 1.0)
