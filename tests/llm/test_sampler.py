"""What the one sampler of all engines samples, against its definition, and in vLLM's batches, which change."""

import importlib
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cosyvoice_triton.llm.checkpoint import read_limits
from cosyvoice_triton.llm.engines.interface import GenerationRequest, candidate_ids
from cosyvoice_triton.llm.interface import LengthRatios, LLMPrompt, Sampling
from cosyvoice_triton.llm.sampler import RequestSampler, uniforms
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

from tests.support import fake_vllm
from tests.support.fake_vllm import BatchUpdate

LOGITS = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], np.float32)  # of the ids from 10
GREEDY = {"temperature": 0.0}
FREE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
RAS = {"top_p": 0.8, "top_k": 25, "temperature": 1.0, "repetition_penalty": 1.0}


def samples(steps, *, logits=LOGITS, requests=1, prompt=(7,), ends=(), seed=0, **sampling):
    """(requests, steps) sampled columns: ids less 10. The requests have seeds of their own."""
    logits = np.asarray(logits, np.float32)
    bias = torch.full((10 + len(logits),), -torch.inf)
    bias[10:] = 0
    sampler = RequestSampler(bias, requests)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 3000} | sampling
    ends = tuple(10 + end for end in ends)
    for slot in range(requests):
        of = Sampling(seed=None if seed is None else seed + slot, **sampling)
        sampler.start(slot, GenerationRequest(np.array(prompt, np.int64), of, ends))
    rows = np.tile(logits, (requests, 1))
    return np.array([sampler.sample(range(requests), rows) for _ in range(steps)]).T - 10


def reference_tokens(
    logits: np.ndarray, numbers: Sequence[tuple[float, float]], sampling: Sampling, prompt: Sequence[int], end: int
) -> list[int]:
    """The tokens that are sampled from the same logits (C,) at each position, with two random numbers for each.

    Repetition-aware sampling as VALL-E 2 (arXiv:2406.05370, section 3.2) and upstream's `ras_sampling` describe it: a
    token of the nucleus that makes up tau or more of the last tokens is replaced by a sample from all tokens. The paper
    leaves the token among them, upstream excludes it.
    """
    sampled: list[int] = []
    for first, second in numbers:
        scores = logits.astype(np.float64)
        for token in {*prompt, *sampled}:
            scores[token] *= (
                1 / sampling.repetition_penalty if scores[token] > 0 else sampling.repetition_penalty
            )  # towards minus infinity
        scores /= sampling.temperature
        if len(sampled) < sampling.min_tokens:
            scores[end] = -np.inf
        weights = np.exp(scores - scores.max())
        ranks = np.argsort(-weights)[: sampling.top_k or None]
        whole = weights.sum() if sampling.ras_window else weights[ranks].sum()
        before = np.cumsum(weights[ranks]) - weights[ranks]  # of the more probable tokens
        kept = np.sort(ranks[before < sampling.top_p * whole])
        token = _picked(kept, weights[kept], first)
        window = sampled[-sampling.ras_window :] if sampling.ras_window else []
        if window and window.count(token) >= sampling.ras_window * sampling.ras_tau:
            weights[token] = 0
            token = _picked(np.arange(len(weights)), weights, second)
        sampled.append(token)
    return sampled


def _picked(tokens: np.ndarray, weights: np.ndarray, number: float) -> int:
    sums = np.cumsum(weights)
    return int(tokens[np.searchsorted(sums, number * sums[-1], side="right")])


def test_temperature_zero_takes_the_most_probable_token_after_penalties_and_exclusions():
    assert set(samples(5, temperature=0)[0]) == {5}
    assert samples(1, temperature=0, repetition_penalty=2.0, prompt=[15]) == 4
    assert samples(4, temperature=0, repetition_penalty=2.0).tolist() == [[5, 4, 3, 5]]
    assert samples(4, temperature=0, ends=[5], min_tokens=2).tolist() == [[4, 4, 5, 5]]


def test_the_seed_determines_the_samples_and_no_seed_does_not():
    first, other = samples(50, seed=3), samples(50, seed=4)
    assert (samples(50, seed=3) == first).all() and (other != first).any()
    assert (samples(50, requests=3, seed=2)[1:] == [first[0], other[0]]).all()  # whatever else is in the batch
    assert (samples(50, seed=None) != samples(50, seed=None)).any()


def test_rounding_of_near_equal_logits_does_not_change_the_sample():
    rng = np.random.default_rng(0)
    near = [rng.normal(0, 1e-7, 6) for _ in range(2)]
    assert (samples(100, logits=near[0], requests=2) == samples(100, logits=near[1], requests=2)).all()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_k": 3, "temperature": 0.8},
        {"top_p": 0.5, "repetition_penalty": 1.3},
        {"top_k": 4, "top_p": 0.5},
        {"top_p": 0.8, "top_k": 25, "ras_window": 10, "ras_tau": 0.2, "repetition_penalty": 1.1},
        {"top_k": 1, "ras_window": 10, "ras_tau": 0.15},  # the first token is always the same one
        {"top_k": 1, "ras_window": 30, "ras_tau": 0.01},
    ],
)
def test_the_tokens_are_those_of_the_definition_with_the_same_random_numbers(sampling):
    logits = np.random.default_rng(3).normal(0, 2, 60).astype(np.float32)
    numbers = uniforms(torch.full((40,), 5), torch.arange(40))[:, :, 0].T.tolist()
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_tokens": 20} | sampling
    expected = reference_tokens(logits, numbers, Sampling(**sampling), prompt=[4, 9], end=int(logits.argmax()))
    found = samples(40, logits=logits, seed=5, prompt=[14, 19], ends=[int(logits.argmax())], **sampling)
    assert found[0].tolist() == expected


def test_the_numbers_of_requests_and_positions_are_independent():
    """Chi-square over a grid of two numbers: of one position, of neighbouring positions and of neighbouring seeds."""
    keys, positions = torch.arange(400)[:, None], torch.arange(400)
    one, two = uniforms(keys.expand(400, 400).flatten(), positions.expand(400, 400).flatten())[:, :, 0].numpy()
    one, two = one.reshape(400, 400), two.reshape(400, 400)
    for pairs in ((one, two), (one[:, :-1], one[:, 1:]), (one[:-1], one[1:]), (one[:, 1:], two[:, :-1])):
        counts, *_ = np.histogram2d(*(part.flatten() for part in pairs), bins=20, range=[(0, 1)] * 2)
        expected = pairs[0].size / 400
        assert abs(((counts - expected) ** 2 / expected).sum() - 399) < 5 * np.sqrt(2 * 399)


def test_the_replacement_is_found_even_if_it_is_a_trillion_times_less_probable():
    logits = [0.0, 0.0, 0.0, 0.0, 0.0, 2000.0]
    assert (samples(3, logits=logits, top_k=1, ras_window=10) == 5).tolist() == [[True, False, False]]


@pytest.mark.parametrize(
    ("text_tokens", "generated", "bounds"),
    [
        (1, 0, (2, 20)),
        (10, 0, (20, 200)),
        (100, 0, (200, 750)),
        (100, 150, (50, 750)),
        (100, 1900, (0, 100)),
        (100, 2000, (0, 1)),
        (500, 0, (750, 750)),
    ],
)
def test_the_length_of_the_text_limits_the_length_of_the_speech(text_tokens, generated, bounds):
    bounded = LengthRatios().bound(Sampling(), LLMPrompt("Hi", generated=[7] * generated), text_tokens)
    assert (bounded.min_tokens, bounded.max_tokens) == bounds


def test_a_text_of_few_tokens_may_last_twice_its_expected_duration():
    motorway = LLMPrompt("高速公路")  # 0.8 s, one token of Qwen2's vocabulary
    assert LengthRatios().bound(Sampling(), motorway, 1).max_tokens == 40
    assert LengthRatios(max=10).bound(Sampling(), motorway, 1).max_tokens == 20


@pytest.mark.parametrize("ratios", [(-1, 2), (3, 2), (0, 0), (0, float("inf")), (float("nan"), 2)])
def test_invalid_ratios_are_an_error(ratios):
    with pytest.raises(ValueError, match="token ratios"):
        LengthRatios(min=ratios[0], max=ratios[1])


OUT_OF_RANGE = {"temperature": (-0.1, float("nan")), "top_p": (0.0, 1.1), "top_k": (-1, 2**31), "seed": (-1, 2**31)}
OUT_OF_RANGE |= {"repetition_penalty": (0.0,), "max_tokens": (0, 10**12), "min_tokens": (751,)}
OUT_OF_RANGE |= {"ras_window": (-1, 65), "ras_tau": (0.0,)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OUT_OF_RANGE for value in OUT_OF_RANGE[name]])
def test_sampling_out_of_range_is_an_error_with_name_and_value(name, value):
    with pytest.raises(ValueError, match=f"{name} {value!r} is out of range: "):
        Sampling(**{name: value})


@pytest.fixture
def processor_class(install):
    install("vllm")
    return importlib.import_module("cosyvoice_triton.llm.vllm_logits").SpeechLogits


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])  # eager, and with CUDA graphs
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
