"""Training data of the LLM: sequences `<|sos|> text <|task_id|> speech <|eos1|>` as serving builds them.

One network is the LLM of both versions. Its vocabulary is CosyVoice3's. A share of the sequences is as CosyVoice3 has
them, with its system words before the text; the others are CosyVoice2's, whose `<|sos|>` is CosyVoice3's `<|fill|>`.

A sequence is one or more utterances of a voice, concatenated. The first of several is a prompt in most cases: its text
joins the next one without a blank, as in serving, and its speech may be that of a poor recording: another microphone,
another speed, or mostly wrong tokens. Such speech is context only and not a target.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.llm.speech_tokens import COSYVOICE2, COSYVOICE3
from tokenizers import Tokenizer, models, trainers
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.random_weights.llm import build_tokenizer

# With this many merges, a text token is about 2.5 letters and 4 speech tokens, which is within the bounds of serving
# for the length of an utterance (cosyvoice_triton.config, min_token_ratio and max_token_ratio).
MERGES = 400
TEXTS_FOR_MERGES = 40_000
LOWER, UPPER = 0.3, 0.04  # shares of the texts in lower case only and in upper case only
NAMES = 0.1  # share of capitalised words, in half of the other texts
CURLED = 0.3  # share of texts with typographic apostrophes
# Each text is read in one of so many ways: another case, and the latter ones with a share of the merges left out. A
# network that sees a text a hundred times learns letters by it, and not the text by heart.
READINGS, UNMERGED = 4, 0.1

UTTERANCES = (1, 2, 3, 4)  # per sequence
UTTERANCES_SHARE = (0.3, 0.45, 0.15, 0.1)
WITH_SYSTEM = 0.5  # share of the sequences with CosyVoice3's system words
MOST_SPEECH = 700  # speech tokens per sequence
WITH_PROMPT = 0.7  # share of the sequences of several utterances
ALTERED, DAMAGED = 0.35, 0.3  # shares of the prompts with perturbed recordings and with replaced tokens
BATCH_TOKENS = 40_000

# CosyVoice2's control tokens at the ids of CosyVoice3's. An end token has to be next to the speech tokens, so that
# CosyVoice2's <|sos|> cannot be CosyVoice3's.
COSYVOICE2_NAMES = replace(COSYVOICE2, after_speech=("<|eos2|>", "<|eos1|>", "<|task_id|>", "<|sos|>"))
COSYVOICE2_SOS = COSYVOICE3.after_speech[COSYVOICE2_NAMES.after_speech.index(COSYVOICE2.sos)]

ABSENT = -1.0
UNKNOWN_PHONE = -100  # which a cross entropy ignores

Ids = np.ndarray
Row = tuple[Ids, np.ndarray, np.ndarray, np.ndarray]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # see Sequences


def text_tokenizer(sentences: Sequence[str]) -> Tokenizer:
    """CosyVoice3's tokenizer, with BPE merges learned from `sentences`."""
    plain = build_tokenizer()
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = plain.pre_tokenizer
    alphabet = json.loads(plain.to_str())["model"]["vocab"]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=list(alphabet), show_progress=False
    )
    rng = random.Random(0)
    learner.train_from_iterator((cased(sentence, rng) for sentence in sentences[:TEXTS_FOR_MERGES]), trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return build_tokenizer([(first, second) for first, second in merges], rules=COSYVOICE3)


def cased(sentence: str, rng: random.Random) -> str:
    """A lower-case sentence in random case: as it is, in capitals, or with capitals at the start, for "I" and names."""
    manner = rng.random()
    if manner < LOWER:
        return sentence
    if manner < LOWER + UPPER:
        return sentence.upper()
    names = NAMES if rng.random() < 0.5 else 0.0
    words = [
        word.capitalize()
        if index == 0 or word.startswith(("i'", "i,")) or word == "i" or rng.random() < names
        else word
        for index, word in enumerate(sentence.split(" "))
    ]
    written = " ".join(words)
    return written.replace("'", "\u2019") if rng.random() < CURLED else written


@dataclass(frozen=True)
class Utterances:
    """Utterances u = 0..U-1: readings of the text, each of ids, `texts[u]`, the same with a leading blank `joined[u]`,
    and their speech.

    voices: (U,). speech: speech ids; altered: those of perturbed recordings of some, no ids of the others. phones: of
    each token of `speech`, (T, 4).
    """

    texts: list[list[Ids]]
    joined: list[list[Ids]]
    voices: np.ndarray
    speech: list[Ids]
    altered: list[Ids]
    phones: list[np.ndarray]


def encoded(tokenizer: Tokenizer, sentences: Sequence[str], blank: str = "") -> list[list[Ids]]:
    """READINGS of each sentence as ids; blank: before it."""
    rng = random.Random(1)
    ways = []
    for way in range(READINGS):
        tokenizer.model.dropout = UNMERGED if way else None
        encodings = tokenizer.encode_batch([blank + cased(sentence, rng) for sentence in sentences])
        ways.append([np.array(encoding.ids, np.int32) for encoding in encodings])
    tokenizer.model.dropout = None
    return [list(readings) for readings in zip(*ways, strict=True)]


class Sequences(IterableDataset):
    """Endless batches: ids (B, L) int64, which of them are targets (B, L) bool, where in the sequence the text of each
    speech token is, about (B, L) float32, ABSENT for other tokens, and the phones of the target speech tokens (B, L, 4)
    int16, UNKNOWN_PHONE for other tokens; padded at the right.

    L takes few values, and each has one B.
    """

    def __init__(self, utterances: Utterances, tokenizer: Tokenizer, members: np.ndarray, seed: int) -> None:
        """members: the utterances to draw from. The attribute `first_speech_id` is the id of <|s_0|>."""
        self._utterances, self._tokens = utterances, np.concatenate(utterances.speech)
        self._by_voice = [members[utterances.voices[members] == voice] for voice in np.unique(utterances.voices)]
        shares = np.array([len(voice) for voice in self._by_voice], np.float64)
        self._voice_shares = shares / shares.sum()
        self._seed = seed
        self.first_speech_id = tokenizer.get_vocab()["<|s_0|>"]
        system = COSYVOICE3.sos + COSYVOICE3.system + COSYVOICE3.end_of_prompt
        self._begin, self._begin_with_system, self._task, self._end = (
            np.array(tokenizer.encode(text).ids, np.int32)
            for text in (COSYVOICE2_SOS, system, COSYVOICE3.task, COSYVOICE3.ends[0])
        )

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng((self._seed, worker.id if worker else 0))
        waiting: defaultdict[int, list[Row]] = defaultdict(list)  # by padded length
        while True:
            sequence = self.random_sequence(rng)
            length = _padded_length(len(sequence[0]))
            waiting[length].append(sequence)
            if len(waiting[length]) == max(1, BATCH_TOKENS // length):
                yield _padded(waiting.pop(length), length)

    def random_sequence(self, rng: np.random.Generator) -> Row:
        """One sequence: a row of a batch, without padding."""
        of_voice = self._by_voice[rng.choice(len(self._by_voice), p=self._voice_shares)]
        count = rng.choice(UTTERANCES, p=UTTERANCES_SHARE)
        chosen = self._fitting(of_voice[rng.integers(len(of_voice), size=count)])
        data = self._utterances
        prompted = len(chosen) > 1 and rng.random() < WITH_PROMPT
        begins = 1 + prompted  # number of texts without a leading blank
        readings = [(data.texts if index < begins else data.joined)[u] for index, u in enumerate(chosen)]
        texts = [ways[rng.integers(len(ways))] for ways in readings]
        first, clean = self._prompt(chosen[0], rng) if prompted else (data.speech[chosen[0]], True)
        speech = [first, *(data.speech[u] for u in chosen[1:])]
        begin = self._begin_with_system if rng.random() < WITH_SYSTEM else self._begin
        heads = [begin, *texts, self._task]
        ids = np.concatenate([*heads, *(part + self.first_speech_id for part in speech), self._end])
        target = np.zeros(len(ids), bool)
        target[sum(map(len, heads)) + (0 if clean else len(first)) :] = True
        phones = np.full((len(ids), data.phones[0].shape[1]), UNKNOWN_PHONE, np.int16)
        targets = chosen if clean else chosen[1:]
        phones[np.flatnonzero(target)[:-1]] = np.concatenate([data.phones[u] for u in targets])
        return ids, target, _places(len(begin), texts, speech), phones

    def _fitting(self, chosen: np.ndarray) -> list[int]:
        """The first ones that together fit into MOST_SPEECH, at least one."""
        kept: list[int] = []
        total = 0
        for u in chosen.tolist():
            total += len(self._utterances.speech[u])
            if kept and total > MOST_SPEECH:
                break
            kept.append(u)
        return kept

    def _prompt(self, u: int, rng: np.random.Generator) -> tuple[Ids, bool]:
        """The speech of a prompt, and whether it is unchanged."""
        kind = rng.random()
        altered = self._utterances.altered[u]
        if kind < ALTERED and len(altered):
            return altered, False
        speech = self._utterances.speech[u]
        return (self._damaged(speech, rng), False) if kind < ALTERED + DAMAGED else (speech, True)

    def _damaged(self, speech: Ids, rng: np.random.Generator) -> Ids:
        """Speech at another speed, a random share of tokens replaced, singly or in runs; the end may be cut off."""
        length = max(4, round(len(speech) * rng.uniform(0.7, 1.5)))
        damaged = speech[np.arange(length) * len(speech) // length].copy()
        run = int(rng.choice((1, 3, 8)))
        replaced = np.repeat(rng.random(-(-length // run)) < rng.random(), run)[:length]
        other = self._tokens[rng.integers(len(self._tokens), size=length)] if rng.random() < 0.5 else None
        damaged[replaced] = (rng.integers(SPEECH_VOCAB, size=length) if other is None else other)[replaced]
        return damaged[: length - rng.integers(0, 5)] if length > 20 else damaged


def _places(begin: int, texts: Sequence[Ids], speech: Sequence[Ids]) -> np.ndarray:
    """The place of each utterance's text, the first at `begin`, that each of its speech tokens is of, if all text takes
    equal time: (L,) of the whole sequence."""
    heads = begin + sum(map(len, texts)) + 1
    places = np.full(heads + sum(map(len, speech)) + 1, ABSENT, np.float32)
    at = heads
    for text, part in zip(texts, speech, strict=True):
        places[at : at + len(part)] = begin - 0.5 + (np.arange(len(part)) + 0.5) * len(text) / len(part)
        begin, at = begin + len(text), at + len(part)
    return places


def _padded_length(length: int) -> int:
    step = 32 if length <= 256 else 64 if length <= 512 else 128
    return -(-length // step) * step


def _padded(rows: Sequence[Row], length: int) -> Batch:
    shape = (len(rows), length)
    batch: list[np.ndarray] = [np.zeros(shape, np.int64), np.zeros(shape, bool), np.full(shape, ABSENT, np.float32)]
    batch.append(np.full((*shape, rows[0][3].shape[1]), UNKNOWN_PHONE, np.int16))
    for index, row in enumerate(rows):
        for padded, values in zip(batch, row, strict=True):
            padded[index, : len(values)] = values
    ids, target, places, phones = (torch.from_numpy(padded) for padded in batch)
    return ids, target, places, phones
