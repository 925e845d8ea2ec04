"""Speech tokens, prompts and their parser, and what upstream's CLI and its Triton runtime give the LLM for the requests
of its examples, recorded as ids of the official vocabulary: `prompt_text` and `tts_text` tokenized apart, as they
are. Texts that arrive in pieces; their sequence is compared with upstream's by tests/parity/llm.py."""

import asyncio
import dataclasses
import itertools
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import OFFICIAL_FIRST_SPEECH_ID, PROMPT_SAMPLE_RATE, SPEECH_VOCAB
from cosyvoice_triton.llm.engines.interface import EngineLM
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling
from cosyvoice_triton.llm.interleaving import LONGEST_WORD, SPEECH_BLOCK, TEXT_BLOCK, InterleavedSpeech, WordSplitter
from cosyvoice_triton.llm.speech_tokens import (
    COSYVOICE2,
    COSYVOICE3,
    LLMTokenizer,
    SpeechTokenParser,
    added_tokens,
    chat_template,
    read_first_speech_id,
    speech_token_text,
)
from cosyvoice_triton.orchestrator.request import RequestRules
from cosyvoice_triton.prepare.huggingface_llm import COSYVOICE2_LLM, COSYVOICE3_LLM, _write_tokenizer
from cosyvoice_triton.stacks import TokenizerRules
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.voice.files import spk2info_prompt
from transformers import Qwen2ForCausalLM

from tests.random_weights.llm import build_tokenizer
from tests.support.fakes import PROMPT_TOKENS, FakeLM
from tests.support.llm_fixtures import load_engine
from tests.support.pipeline import Pipeline
from tests.support.qwen_vocabulary import qwen2_tokenizer, write_blank_en

VOICE = LLMPrompt("", "A transcript.", range(100, 137))
GREEDY = Sampling(temperature=0, repetition_penalty=1.0)


def encode(tokenizer, text):
    return tokenizer.tokenizer.encode(text, add_special_tokens=False).ids


def test_other_control_tokens_are_a_matter_of_the_rules(tokenizer):
    """What another LLM calls its tokens is data: the template, the parser and the added tokens follow."""
    rules = TokenizerRules(
        sos="<s>", task="<t>", ends=("<end>",), end_of_prompt="<p>", after_speech=("<end>", "<s>", "<t>")
    )
    own = dataclasses.replace(tokenizer, rules=rules)
    assert own.prompt_string(LLMPrompt("Hello", instruction="sadly")) == "<s>sadly<p>Hello<t>"
    assert added_tokens(rules)[-3:] == ["<end>", "<s>", "<t>"] and "<s>" in chat_template(rules)
    parser = SpeechTokenParser(rules)
    assert parser.feed("<|s_5|><|eos1|><|s_6|><end><|s_7|>") == [5, 6] and parser.ended


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (LLMPrompt("Hi.", "Said."), "You are a helpful assistant.<|endofprompt|>Said.Hi."),
        (LLMPrompt("Hi."), "You are a helpful assistant.<|endofprompt|>Hi."),
        (LLMPrompt("Hi.", instruction="Whisper."), "You are a helpful assistant. Whisper.<|endofprompt|>Hi."),
        (LLMPrompt("Hi.", "Said.", (), "Whisper."), "You are a helpful assistant. Whisper.<|endofprompt|>Said.Hi."),
        (
            LLMPrompt("Hi.", instruction="You are a helpful assistant.<|endofprompt|>"),
            "You are a helpful assistant.<|endofprompt|>Hi.",
        ),
        (
            LLMPrompt("Hi.", instruction="You are a helpful assistant. Whisper.<|endofprompt|>"),
            "You are a helpful assistant. Whisper.<|endofprompt|>Hi.",
        ),
    ],
)
def test_cosyvoice3_prompts_begin_with_its_system_words_once(tokenizer, prompt, text):
    own = dataclasses.replace(tokenizer, rules=COSYVOICE3)
    assert own.prompt_string(prompt) == f"<|sos|>{text}<|task_id|>"
    end = tokenizer.tokenizer.token_to_id("<|endofprompt|>")
    assert np.count_nonzero(own.encode_prompt(prompt) == end) == 1


def test_every_special_speech_token_of_cosyvoice3_ends_an_utterance():
    first = ["<|sos|>", "<|eos1|>", "<|task_id|>", "<|fill|>", "<|s_6565|>"]
    assert added_tokens(COSYVOICE3)[SPEECH_VOCAB:][:5] == first
    assert len(added_tokens(COSYVOICE3)) == SPEECH_VOCAB + 200 == len({*added_tokens(COSYVOICE3)})
    assert {*COSYVOICE3.ends} == {*added_tokens(COSYVOICE3)[SPEECH_VOCAB:]}
    for token in COSYVOICE3.ends:
        parser = SpeechTokenParser(COSYVOICE3)
        assert parser.feed(f"<|s_5|>{token}<|s_6|>") == [5] and parser.ended


def test_an_end_token_longer_than_any_speech_token_may_arrive_in_pieces():
    parser = SpeechTokenParser(TokenizerRules(ends=("<|end of the speech|>",)))
    assert parser.feed("<|s_5|><|end of the spe") == [5] and not parser.ended
    assert parser.feed("ech|><|s_6|>") == [] and parser.ended


def test_the_first_speech_id_is_read_from_the_tokenizer_or_the_official_one(llm_dir, tokenizer):
    assert read_first_speech_id("") == OFFICIAL_FIRST_SPEECH_ID
    assert read_first_speech_id(str(llm_dir)) == tokenizer.first_speech_id
    assert tokenizer.first_speech_id == build_tokenizer().token_to_id("<|s_0|>")


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"no file {tmp_path}/tokenizer.json"):
        LLMTokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    with pytest.raises(ValueError, match=f"{tmp_path}/tokenizer.json is not a tokenizer, or is damaged: EOF"):
        LLMTokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("missing", ["<|s_0|>", "<|eos1|>", "<|sos|>", "<|task_id|>", "<|endofprompt|>"])
def test_a_tokenizer_of_another_model_is_an_error_with_the_missing_token(tmp_path, llm_dir, missing):
    content = json.loads((llm_dir / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != missing]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has no token " + missing.replace("|", r"\|")):
        LLMTokenizer.from_dir(tmp_path)


def test_the_template_is_the_same_as_ids_and_as_text(tokenizer):
    prompt = LLMPrompt("Target 文本.", "Prompt text. ", [0, 5, SPEECH_VOCAB - 1])
    text = tokenizer.prompt_string(prompt)
    assert text == "<|sos|>Prompt text. Target 文本.<|task_id|><|s_0|><|s_5|><|s_6560|>"
    assert tokenizer.encode_prompt(prompt).tolist() == encode(tokenizer, text)
    continued = LLMPrompt("Target 文本.", "Prompt text. ", [0], generated=(5, SPEECH_VOCAB - 1))
    assert tokenizer.prompt_string(continued) == text
    assert tokenizer.encode_prompt(continued).tolist() == encode(tokenizer, text)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    qwen2_tokenizer().save(str(directory / "tokenizer.json"))
    return LLMTokenizer.from_dir(directory)


@pytest.mark.parametrize("text", ["The end.", "Hello there.", "We know.", "It was so.", "A cat sat.", "No, thanks."])
def test_the_transcript_and_the_text_share_no_token(qwen2, text):
    """Upstream tokenizes `prompt_text` and `tts_text` one by one and joins the ids."""
    prompt = LLMPrompt(text, "So it was.")
    apart = encode(qwen2, prompt.prompt_text) + encode(qwen2, text)
    assert encode(qwen2, prompt.prompt_text + text) != apart  # Qwen2 has tokens such as `.The` and `.H`
    assert qwen2.encode_prompt(prompt).tolist() == [qwen2.sos_id, *apart, qwen2.task_id]
    joined = qwen2.joined_text(prompt)  # as near as one text comes to that
    assert joined == f"So it was. {text}"
    assert encode(qwen2, joined) == encode(qwen2, prompt.prompt_text) + encode(qwen2, " " + text)


@pytest.mark.parametrize(
    "prompt",
    [
        LLMPrompt("The end."),
        LLMPrompt("The end.", instruction="Slowly."),
        LLMPrompt("你好，请问你叫什么？", "希望你以后能够做得比我还好哟。"),
        LLMPrompt("こんにちは。", "そうです。"),
    ],
)
def test_texts_that_share_no_token_anyway_are_joined_without_a_blank(qwen2, prompt):
    assert encode(qwen2, qwen2.prompt_string(prompt)) == qwen2.encode_prompt(prompt).tolist()


@pytest.mark.parametrize(
    "prompt",
    [
        LLMPrompt("Hi<|s_1|>"),
        LLMPrompt("Hi", "<|eos1|>"),
        LLMPrompt("1|>", "Hi<|s_"),  # two halves
        LLMPrompt("s_1|>", "Hi<|s_<|eos1|>1|><|"),
        LLMPrompt("1|>", instruction="Hi<|s_"),
        LLMPrompt("<|task_id|>", "Hi"),
    ],
)
def test_control_tokens_in_the_text_never_reach_the_llm(tokenizer, prompt):
    for ids in (tokenizer.encode_prompt(prompt).tolist(), encode(tokenizer, tokenizer.prompt_string(prompt))):
        control = {*tokenizer.end_ids, tokenizer.sos_id, tokenizer.task_id}
        assert ids[0] == tokenizer.sos_id
        assert ids[-1] == tokenizer.task_id
        assert not control.intersection(ids[1:-1])
        assert tokenizer.to_speech_ids(ids) == []


def test_an_instruction_ends_with_its_token_and_contains_no_other_control_token(tokenizer):
    end = COSYVOICE2.end_of_prompt
    prompt = LLMPrompt("Target" + end, instruction="sadly<|s_1|>" + end)
    assert tokenizer.prompt_string(prompt) == "<|sos|>sadly<|endofprompt|>Target <|task_id|>"
    ids = tokenizer.encode_prompt(prompt).tolist()
    assert ids.count(tokenizer.tokenizer.token_to_id(end)) == 1
    assert ids == encode(tokenizer, tokenizer.prompt_string(prompt))


def test_a_transcript_that_upstream_saved_is_spoken_to_the_llm_as_upstream_does(tmp_path):
    """CosyVoice3's `add_zero_shot_spk` keeps the ids of the system words with it."""
    build_tokenizer(rules=COSYVOICE3).save(str(tmp_path / "tokenizer.json"))
    tokenizer = LLMTokenizer.from_dir(tmp_path)
    saved = encode(tokenizer, "You are a helpful assistant.<|endofprompt|>希望你好。")
    speaker = {"prompt_text": torch.tensor([saved]), "speech_token": torch.ones(1, 30), "embedding": torch.ones(1, 192)}
    voice = spk2info_prompt(speaker | {"speech_feat": torch.ones(1, 60, 80)}, "anna", tokenizer.decode)
    assert voice.text == "希望你好。"
    ids = tokenizer.encode_prompt(LLMPrompt("Hi.", voice.text)).tolist()
    assert ids == [tokenizer.sos_id, *saved, *encode(tokenizer, "Hi."), tokenizer.task_id]


def test_speech_ids_survive_conversion_and_what_is_not_speech_is_dropped(tokenizer):
    ids = [0, 17, SPEECH_VOCAB - 1]
    assert tokenizer.to_speech_ids(tokenizer.to_llm_ids(ids)) == ids
    assert tokenizer.to_speech_ids([3, tokenizer.first_speech_id + 7, *tokenizer.end_ids]) == [7]


@pytest.mark.parametrize("token", [-1, SPEECH_VOCAB])
def test_a_prompt_token_outside_the_codebook_is_an_error(tokenizer, token):
    with pytest.raises(ValueError, match=f"speech token {token} is outside"):
        tokenizer.encode_prompt(LLMPrompt("Hi", "", [token]))


@pytest.mark.parametrize("seed", range(5))
def test_the_parser_reads_the_same_tokens_however_the_text_is_split(seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(SPEECH_VOCAB) for _ in range(50)]
    text = speech_token_text(tokens)
    parser = SpeechTokenParser()
    found = []
    while text:
        size = rng.randint(1, 12)
        found += parser.feed(text[:size])
        text = text[size:]
    assert found == tokens


def test_the_parser_skips_text_that_is_not_a_speech_token():
    parser = SpeechTokenParser()
    assert parser.feed("noise <|s_1|>文<|s_99999|><|s_6561|><|im_end|><<|s_2|>") == [1, 2]
    assert not parser.ended


def test_unfinished_text_does_not_accumulate():
    parser = SpeechTokenParser()
    for _ in range(100):
        parser.feed("<|never a token ")
    assert len(parser._pending) < 20


def test_a_prompt_of_ids_is_no_text(tokenizer):
    prompt = LLMPrompt("Hi", ids=[1, 2])
    assert tokenizer.encode_prompt(prompt).tolist() == [1, 2]
    for text_of in (tokenizer.prompt_string, tokenizer.joined_text):
        with pytest.raises(ValueError, match="needs an LLM server that takes token ids"):
            text_of(prompt)


RECORDED = Path(__file__).parents[1] / "assets" / "upstream_prompts.jsonl"
CASES = [json.loads(line) for line in RECORDED.read_text().splitlines()]
OFFICIAL = {"cosyvoice2": COSYVOICE2_LLM, "cosyvoice3": COSYVOICE3_LLM}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLMTokenizer]:
    folder = tmp_path_factory.mktemp("official")
    write_blank_en(folder / "blank")
    return {name: _write_tokenizer(folder / "blank", folder / name, llm) for name, llm in OFFICIAL.items()}


@pytest.mark.parametrize("case", CASES, ids=[f"{each['model']}-{each['call']}-{n}" for n, each in enumerate(CASES)])
def test_the_llm_gets_upstream_s_ids(case: dict[str, Any], tokenizers: dict[str, LLMTokenizer]) -> None:
    tokenizer, pipeline = tokenizers[case["model"]], Pipeline(FakeLM([1]))
    pipeline.texts = TextFrontend("cosyvoice3" if case["model"] == "cosyvoice3" else "unet")  # type: ignore[assignment]
    wav = np.full(PROMPT_SAMPLE_RATE, 0.1, np.float32)
    wav[::2] *= -1
    request = RequestRules().request(reference_wav=wav, **case["request"])
    pipeline.run(pipeline.synthesize(request))
    (prompt,) = pipeline.llm.prompts
    ids = tokenizer.encode_prompt(prompt).tolist()
    speech = [tokenizer.first_speech_id] * PROMPT_TOKENS if case["speech"] else []
    assert ids == [tokenizer.sos_id, *case["ids"], tokenizer.task_id, *speech]


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
