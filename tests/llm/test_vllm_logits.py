"""Sampling in vLLM, in batches that change as in vLLM."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cosyvoice_triton.llm.checkpoint import read_limits
from cosyvoice_triton.llm.engines.interface import GenerationRequest, candidate_ids
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.llm.sampler import RequestSampler
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

from tests.support import fake_vllm
from tests.support.fake_vllm import BatchUpdate

GREEDY = {"temperature": 0.0}
FREE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
RAS = {"top_p": 0.8, "top_k": 25, "temperature": 1.0, "repetition_penalty": 1.0}


@pytest.fixture
def processor_class(install):
    install("vllm")
    return importlib.import_module("cosyvoice_triton.llm.vllm_logits").SpeechLogits


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])  # eager, and with CUDA graphs
def batch(request, processor_class, llm_dir):
    torch.manual_seed(0)
    return Batch(processor_class, llm_dir, torch.device(request.param))


class Batch:
    """What vLLM does around the processor: a batch with indices, growing lists of ids, an argmax over the logits."""

    def __init__(self, processor_class, directory, device):
        self.vocab_size = read_limits(directory).vocab_size
        model = SimpleNamespace(model=str(directory), get_vocab_size=lambda: self.vocab_size)
        config = SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=8))
        tokenizer = LLMTokenizer.from_dir(directory)
        self.candidates, self.end_ids = candidate_ids(tokenizer), tokenizer.end_ids
        self.width = len(self.candidates)
        self.ids: list[list[int]] = []
        self._device = device
        self._processor = processor_class(config, device, device.type == "cuda")

    def add(self, *extra_args, prompt=(), output=(), index=None, **sampling):
        """Append a request, or put it at `index` in place of another; `output`: ids that it generated before."""
        params = fake_vllm.SamplingParams(**sampling, extra_args=extra_args[0] if extra_args else None)
        type(self._processor).validate_params(params)
        index = len(self.ids) if index is None else index
        self.ids[index : index + 1] = [list(output)]
        self._processor.update_state(BatchUpdate([], [(index, params, list(prompt), self.ids[index])], []))

    def remove(self, index):
        """Remove a request; the last one moves to its index."""
        last = len(self.ids) - 1
        self.ids[index] = self.ids[last]
        self.ids.pop()
        self._processor.update_state(BatchUpdate([index], [], [(last, index, False)] if index < last else []))

    def swap(self, one, other):
        self.ids[one], self.ids[other] = self.ids[other], self.ids[one]
        self._processor.update_state(BatchUpdate([], [], [(one, other, True)]))

    def step(self, logits, discarded=()):
        """Logits of the candidates (C,) or (B, C) -> columns (B,); vLLM discards those of the indices `discarded`."""
        full = torch.zeros(len(self.ids), self.vocab_size, device=self._device)
        full[:, self.candidates] = torch.as_tensor(logits, dtype=torch.float32, device=self._device)
        sampled = self._processor.apply(full).argmax(1).tolist()
        for index, token in enumerate(sampled):
            if index not in discarded:
                self.ids[index].append(token)
        return [int(np.searchsorted(self.candidates, token)) for token in sampled]


def peaked(batch, *columns):
    """Logits (C,) with some columns above the rest, in descending order."""
    logits = np.full(batch.width, -4.0)
    logits[list(columns)] = 4.0 - np.arange(len(columns))
    return logits


def test_the_penalty_counts_prompt_and_sampled_tokens_of_the_own_request(batch):
    first = int(batch.candidates[0])
    batch.add(**GREEDY, repetition_penalty=2.0, prompt=[first + 7, 3])
    batch.add(**GREEDY, repetition_penalty=2.0)
    batch.add(**GREEDY)
    logits = np.tile(peaked(batch, 7, 8, 9), (3, 1))  # 4, 3 and 2; halved: 2, 1.5 and 1
    assert batch.step(logits) == [8, 7, 7]
    assert batch.step(logits) == [7, 8, 7]  # of 2, 1.5 and 2: the first maximum
    batch.swap(0, 2)
    assert batch.step(logits) == [7, 7, 7]
    batch.remove(1)
    batch.add(index=1, **GREEDY, repetition_penalty=2.0)  # replaces a request that was not removed
    assert batch.step(logits[0]) == [7, 7]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("ras_window", [0, 10])
def test_logits_that_are_not_finite_leave_the_other_requests_alone(batch, bad, ras_window):
    """On a GPU an index out of range would end vLLM's process."""
    batch.add({"ras_window": ras_window}, **FREE)
    batch.add(**GREEDY)
    logits = np.tile(peaked(batch, 3), (2, 1))
    logits[0, 5] = bad
    for _ in range(12):
        assert batch.step(logits)[1] == 3


def test_tokens_that_vllm_discards_do_not_count(batch):
    batch.add(**GREEDY, repetition_penalty=2.0)
    batch.add(**FREE, seed=5)
    logits = np.tile(peaked(batch, 3, 4, 5, 6), (2, 1))
    first = batch.step(logits, discarded=(0, 1))
    assert batch.step(logits) == first
    assert batch.step(logits)[0] == 4


def test_a_request_that_is_added_again_keeps_its_tokens(batch):
    batch.add(**GREEDY, repetition_penalty=2.0, prompt=[int(batch.candidates[3])])
    assert batch.step(peaked(batch, 3, 4, 5)) == [4]
    output = batch.ids[0]
    batch.remove(0)
    batch.add(**GREEDY, repetition_penalty=2.0, prompt=[int(batch.candidates[3])], output=output)
    assert batch.step(peaked(batch, 3, 4, 5)) == [3]  # of 2, 1.5 and 2: the first maximum
    output = batch.ids[0]
    batch.remove(0)
    batch.add(**GREEDY, repetition_penalty=2.0, output=output)
    assert batch.step(peaked(batch, 4, 5)) == [5]  # 4 is not the last one


@pytest.mark.parametrize(
    "sampling", [FREE, FREE | {"top_k": 3, "temperature": 0.8}, FREE | {"top_p": 0.5, "repetition_penalty": 1.3}, RAS]
)
def test_a_seed_gives_the_tokens_of_the_other_engines(batch, sampling):
    logits = np.random.default_rng(3).normal(0, 2, batch.width).astype(np.float32)
    ras = {"ras_window": 10, "ras_tau": 0.2} if sampling is RAS else {}
    batch.add(ras, **sampling, seed=5, min_tokens=20, max_tokens=30)
    bias = np.full(batch.candidates[-1] + 1, -np.inf, np.float32)
    bias[batch.candidates] = 0
    other = RequestSampler(torch.from_numpy(bias), 1)
    of = Sampling(**sampling, **ras, seed=5, min_tokens=20, max_tokens=30)
    other.start(0, GenerationRequest(np.array([3]), of, tuple(batch.end_ids)))
    for _ in range(30):
        assert [batch.candidates[column] for column in batch.step(logits)] == other.sample([0], logits[None])


def test_vllm_itself_samples_greedily(processor_class):
    params = fake_vllm.SamplingParams(
        temperature=0.5, top_p=0.9, top_k=-1, repetition_penalty=1.2, seed=3, min_tokens=4, max_tokens=9
    )
    for _ in range(2):  # vLLM may validate twice
        processor_class.validate_params(params)
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0, 1, 0, 1)
        assert (params.seed, params.min_tokens) == (None, 0)
        sampling = params.extra_args["speech_sampling"]
        wanted = {"temperature": 0.5, "top_k": 0, "repetition_penalty": 1.2, "seed": 3, "min_tokens": 4}
        assert wanted.items() <= sampling.items()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"extra_args": {"ras_window": "ten"}}, "ras_window"),
        ({"extra_args": {"ras_window": 10.0}}, "ras_window 10.0 is not an integer"),
        ({"extra_args": {"speech_sampling": {"seed": 1.5}}}, "seed 1.5 is not an integer"),
        ({"extra_args": {"ras_window": 65}}, "ras_window 65 is out of range: 0..64"),
        ({"extra_args": {"speech_sampling": {"colour": 1}}}, "colour"),
        ({"extra_args": {"speech_sampling": 3}}, "speech_sampling 3"),
        ({"frequency_penalty": 0.5}, "frequency_penalty 0.5 is not supported for speech"),
        ({"top_p": 0.0}, "top_p 0.0 is out of range"),
    ],
)
def test_invalid_values_are_rejected_before_they_reach_the_engine(processor_class, params, message):
    with pytest.raises(ValueError, match=message):
        processor_class.validate_params(fake_vllm.SamplingParams(**params))
