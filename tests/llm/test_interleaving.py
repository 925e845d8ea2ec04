"""Texts that arrive in pieces, and the engines that speak them. The sequence is compared with upstream's by
tests/parity/llm.py."""

import asyncio
import dataclasses
import itertools
from functools import partial

import pytest
import torch
from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.llm.engines.interface import EngineLM
from cosyvoice_triton.llm.engines.loading import load_engine
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.llm.interleaving import LONGEST_WORD, SPEECH_BLOCK, TEXT_BLOCK, InterleavedSpeech, WordSplitter
from cosyvoice_triton.llm.speech_tokens import COSYVOICE3
from transformers import Qwen2ForCausalLM

from tests.support.qwen_vocabulary import qwen2_tokenizer

VOICE = LLMPrompt("", "A transcript.", range(100, 137))
GREEDY = Sampling(temperature=0, repetition_penalty=1.0)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("  It is\n\nten o'clock, Dr. Li.  ", ["It", " is", " ten", " o'clock,", " Dr.", " Li."]),
        ("今天天气，很好。", ["今", "天", "天气，", "很好。"]),
        ("请输入姓名，在测试之前初始化", ["请", "输", "入", "姓名，在", "测试", "之", "前", "初始化"]),
        ("ありがとうございました。気持ちが、仕事を", ["ありがとうございました。", "気持ちが、", "仕事を"]),
        ("a<|s_5|>b <|endofprompt|> c", ["a b", " c"]),
        ("x" * 66, ["x", "x", "x" * 64]),
        (" \n ", []),
    ],
)
def test_a_text_is_cut_where_its_tokens_end_whatever_its_pieces(text, parts, official_ids):
    for size in (1, 3, 100):
        words = WordSplitter(official_ids)
        found = [words.push(text[at : at + size]) for at in range(0, len(text), size)] + [words.finish()]
        assert "".join(found) == "".join(parts)
        if size == 1:
            assert [part for part in found if part] == parts
        if len(text) <= LONGEST_WORD:
            assert sum(map(official_ids, found), []) == official_ids("".join(parts))


@pytest.fixture(scope="module")
def official_ids():
    tokenizer = qwen2_tokenizer()
    return lambda text: tokenizer.encode(text).ids


@pytest.fixture(scope="module")
def engine(genai_dir, tokenizer):
    engine = load_engine("onnxruntime_genai", genai_dir, tokenizer, 4)
    yield engine
    engine.close()


class AskedLM(EngineLM):
    """Keep the ids of its requests, and how they are sampled."""

    def generate(self, prompt, sampling):
        self.asked = [*getattr(self, "asked", ()), (list(prompt.ids), sampling)]
        return super().generate(prompt, sampling)


async def pieces_of(*pieces):
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


async def speak(engine, tokenizer, text, sampling, prompt=VOICE):
    llm = AskedLM(engine, tokenizer)
    chunks = [chunk async for chunk in InterleavedSpeech(llm, tokenizer, prompt, sampling).generate(pieces_of(*text))]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return tokens, *zip(*llm.asked, strict=True), chunks[-1].finish_reason


def test_an_engine_speaks_a_sequence_as_transformers_would(engine, tokenizer, llm_dir):
    """At a temperature of 0, every token is the best one after what transformers is fed: the sequence up to it."""
    text = "Twelve, all."
    tokens, asked, *_ = asyncio.run(speak(engine, tokenizer, text, GREEDY))
    assert len(asked) == 1 + (len(text) - 2) // TEXT_BLOCK + 1  # a token is a letter; the voice takes two of them
    # A block of 8 continues the voice's last one; the final request follows the token that is fed twice.
    counts = [8, *[SPEECH_BLOCK] * (len(asked) - 2)]
    counts.append(len(tokens) - sum(counts))
    whole = [*asked[-1], *tokenizer.to_llm_ids(tokens[-counts[-1] :]).tolist()]
    with torch.no_grad():
        model = Qwen2ForCausalLM.from_pretrained(llm_dir, dtype=torch.float32)
        logits = model(torch.tensor(whole)[None]).logits[0].numpy()  # (S, V)
    speech = slice(tokenizer.first_speech_id, tokenizer.first_speech_id + SPEECH_VOCAB)
    done = 0
    for ids, count in zip(asked, counts, strict=True):
        assert whole[: len(ids)] == ids
        best = logits[len(ids) - 1 : len(ids) + count - 1, speech].argmax(1)
        assert best.tolist() == tokens[done : done + count]
        done += count


def test_each_block_is_a_request_of_its_own_that_continues_the_one_before(engine, tokenizer):
    sampling = Sampling(temperature=0, repetition_penalty=1.0, seed=3)
    _, asked, samplings, _ = asyncio.run(speak(engine, tokenizer, "Twelve, and one more.", sampling))
    blocks = [(of.min_tokens, of.max_tokens) for of in samplings[:-1]]
    assert blocks == [(8, 8), *[(SPEECH_BLOCK, SPEECH_BLOCK)] * (len(asked) - 2)] and len(blocks) > 3
    assert len({of.seed for of in samplings}) == len(asked), "blocks of the same random numbers sound alike"
    for before, after in itertools.pairwise(asked):
        assert after[: len(before)] == before  # what a prefix cache holds


def test_a_text_of_less_than_a_block_is_spoken_and_one_of_nothing_is_an_error(engine, tokenizer):
    tokens, asked, *_ = asyncio.run(speak(engine, tokenizer, "Hi.", GREEDY, LLMPrompt("")))
    assert tokens and list(asked) == [[tokenizer.sos_id, *tokenizer.text_ids("Hi."), tokenizer.task_id]]
    with pytest.raises(ValueError, match="nothing to speak"):
        asyncio.run(speak(engine, tokenizer, " ?! ", GREEDY))


def test_a_text_that_stops_midway_cancels_its_request(engine, tokenizer):
    async def broken():
        yield "A beginning that is long enough for several blocks. "
        raise TimeoutError("no more")

    async def run():
        speech = partial(InterleavedSpeech, EngineLM(engine, tokenizer), tokenizer, VOICE, GREEDY)
        with pytest.raises(TimeoutError):
            _ = [chunk async for chunk in speech().generate(broken())]
        stream = speech().generate(pieces_of("word " * 9))
        await anext(stream)
        await stream.aclose()
        while engine.live:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_instructions_and_system_words_come_first(tokenizer):
    prompt = LLMPrompt("", instruction="Slowly")
    assert tokenizer.prompt_ids(prompt) == ([], tokenizer.text_ids("Slowly<|endofprompt|>"))
    other = dataclasses.replace(tokenizer, rules=COSYVOICE3)
    system = tokenizer.text_ids("You are a helpful assistant. Slowly<|endofprompt|>")
    assert other.prompt_ids(prompt) == (system, [])
