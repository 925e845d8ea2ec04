"""Speech tokens in the LLM's vocabulary, `<|s_N|>`, as ids and as text, and the prompt template."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cosyvoice_triton.constants import OFFICIAL_FIRST_SPEECH_ID, SPEECH_VOCAB
from cosyvoice_triton.llm.interface import LLMPrompt
from cosyvoice_triton.stacks import COSYVOICE2_TOKENS, COSYVOICE3_TOKENS, TokenizerRules
from cosyvoice_triton.text.cleaning import strip_control_tokens

COSYVOICE2, COSYVOICE3 = COSYVOICE2_TOKENS, COSYVOICE3_TOKENS


def chat_template(rules: TokenizerRules = COSYVOICE2) -> str:
    """Return the prompt template as a chat, for servers that accept messages."""
    return (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        f"{{{{ '{rules.sos}' + message['content'] + '{rules.task}' }}}}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{% endif %}{% endfor %}"
    )


def speech_token_text(tokens: Sequence[int]) -> str:
    """Return speech ids 0..6560 as text of the LLM: `<|s_5|><|s_17|>`."""
    return "".join(f"<|s_{token}|>" for token in tokens)


def added_tokens(rules: TokenizerRules = COSYVOICE2) -> list[str]:
    """Return the tokens that the LLM adds to Qwen2's vocabulary, in the order of their ids."""
    return [*(f"<|s_{token}|>" for token in range(SPEECH_VOCAB)), *rules.after_speech]


@dataclass(frozen=True)
class LLMTokenizer:
    """The LLM's tokenizer, limited to what speech needs. Thread-safe.

    first_speech_id: id of `<|s_0|>`; the ids of all speech tokens are consecutive from there.
    end_ids: ids that end an utterance, `<|eos1|>` first.
    """

    tokenizer: Tokenizer = field(repr=False)
    first_speech_id: int
    end_ids: tuple[int, ...]
    sos_id: int
    task_id: int
    rules: TokenizerRules = COSYVOICE2

    @classmethod
    def from_dir(cls, tokenizer_dir: str | Path, rules: TokenizerRules | None = None) -> "LLMTokenizer":
        """Read `tokenizer.json`. rules: by default CosyVoice3's if it has the last of their tokens, else CosyVoice2's.

        Raises ValueError if the file is missing or not the tokenizer of such an LLM.
        """
        path = Path(tokenizer_dir) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"LLM tokenizer: no file {path}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # what the library raises is no more specific
            raise ValueError(f"{path} is not a tokenizer, or is damaged: {error}") from None

        if rules is None:
            rules = COSYVOICE2 if tokenizer.token_to_id(COSYVOICE3.after_speech[-1]) is None else COSYVOICE3

        def token_id(token: str) -> int:
            found = tokenizer.token_to_id(token)
            if found is None:
                raise ValueError(f"{path} has no token {token}: not the tokenizer of a CosyVoice LLM")
            return found

        first, last = token_id("<|s_0|>"), SPEECH_VOCAB - 1
        if token_id(f"<|s_{last}|>") != first + last:
            raise ValueError(f"{path}: ids of <|s_0|>..<|s_{last}|> are not consecutive from {first}")
        # The official vocabularies have all end tokens, of which only the first is used in training.
        others = (tokenizer.token_to_id(token) for token in rules.ends[1:])
        end_ids = (token_id(rules.ends[0]), *(found for found in others if found is not None))
        token_id(rules.end_of_prompt)  # its id is not used, but its text must be one token
        sos_id, task_id = token_id(rules.sos), token_id(rules.task)
        return cls(tokenizer, first, end_ids, sos_id, task_id, rules)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Special tokens stay: CosyVoice3 saves transcripts with its system words, which are
        known by the token after them."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode_prompt(self, prompt: LLMPrompt) -> np.ndarray:
        """Return the token ids (n,) of the template `<|sos|>{prompt text}{target text}<|task_id|>{speech tokens}`.

        The prompt text is the instruction, after CosyVoice3's system words, and the transcript. It is tokenized apart
        from the target text, as by upstream's `CosyVoiceFrontEnd`: no token spans both.
        """
        if prompt.ids:
            return np.array(prompt.ids, np.int64)
        before, target = self._texts(prompt)
        text = [self.sos_id, *self.text_ids(before), *self.text_ids(target), self.task_id]
        return np.concatenate([np.array(text, np.int64), self.to_llm_ids(prompt.speech_tokens)])

    def prompt_ids(self, prompt: LLMPrompt) -> tuple[list[int], list[int]]:
        """Return the ids before the target text: CosyVoice3's system words with an instruction, and the rest."""
        ids = self.text_ids(self._texts(prompt)[0])
        if not self.rules.system:
            return [], ids
        end = self.text_ids(self.rules.end_of_prompt)[0]
        return ids[: ids.index(end) + 1], ids[ids.index(end) + 1 :]

    def text_length(self, text: str) -> int:
        """Return the number of LLM tokens in `text`."""
        return len(self.text_ids(strip_control_tokens(text)))

    def prompt_string(self, prompt: LLMPrompt) -> str:
        """Return the same template as text, for servers that tokenize themselves."""
        text = self.joined_text(prompt)
        return f"{self.rules.sos}{text}{self.rules.task}{speech_token_text(prompt.speech_tokens)}"

    def joined_text(self, prompt: LLMPrompt) -> str:
        """Return prompt and target text as one, which tokenizes to their ids in `encode_prompt` where that is possible.

        Where a token would span both texts, such as `.The` or a control token, a blank separates them. ValueError for a
        prompt of ids.
        """
        if prompt.ids:
            raise ValueError("text in pieces needs an LLM server that takes token ids")
        before, target = self._texts(prompt)
        apart = self.text_ids(before) + self.text_ids(target)
        return before + target if self.text_ids(before + target) == apart else f"{before} {target}"

    def _texts(self, prompt: LLMPrompt) -> tuple[str, str]:
        """Return prompt and target text, with no control token except the one that ends an instruction."""
        instruction, transcript = (
            strip_control_tokens(prompt.instruction).strip(),
            strip_control_tokens(prompt.prompt_text),
        )
        if self.rules.system:
            instruction = f"{self.rules.system} {instruction.removeprefix(self.rules.system).strip()}".strip()
        before = instruction + self.rules.end_of_prompt if instruction else ""
        return before + transcript, strip_control_tokens(prompt.target_text)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text without control tokens."""
        return list(self._ids(text)) if text else []

    @cached_property
    def _ids(self) -> Callable[[str], tuple[int, ...]]:
        """Return what tokenizes a text, once for the bound of its answer and its prompt, and once for a transcript."""
        return lru_cache(256)(lambda text: tuple(self.tokenizer.encode(text, add_special_tokens=False).ids))

    def to_llm_ids(self, tokens: Sequence[int]) -> np.ndarray:
        """Return speech ids 0..6560 (n,) as ids of the LLM (n,). ValueError for any other id."""
        ids = np.asarray(tokens, np.int64)
        if len(ids) and not (0 <= ids.min() and ids.max() < SPEECH_VOCAB):
            raise ValueError(
                f"speech token {ids[(ids < 0) | (ids >= SPEECH_VOCAB)][0]} is outside 0..{SPEECH_VOCAB - 1}"
            )
        return ids + self.first_speech_id

    def to_speech_ids(self, llm_ids: Sequence[int]) -> list[int]:
        """Return ids of the LLM as speech ids, without text and control tokens."""
        first, end = self.first_speech_id, self.first_speech_id + SPEECH_VOCAB
        return [token - first for token in llm_ids if first <= token < end]


def read_first_speech_id(tokenizer_dir: str) -> int:
    """Return the id of `<|s_0|>` in the LLM's vocabulary; the official one if `tokenizer_dir` is empty."""
    return LLMTokenizer.from_dir(tokenizer_dir).first_speech_id if tokenizer_dir else OFFICIAL_FIRST_SPEECH_ID


class SpeechTokenParser:
    """Read speech ids from streamed text whose pieces may end anywhere inside a token. Other text is skipped."""

    def __init__(self, rules: TokenizerRules = COSYVOICE2) -> None:
        self._ends = frozenset(rules.ends)
        ends = "|".join(re.escape(token) for token in rules.ends)
        self._token = re.compile(rf"<\|s_(\d{{1,4}})\|>|{ends}")
        self._longest = max(map(len, (*rules.ends, f"<|s_{SPEECH_VOCAB}|>")))
        self.ended = False  # an end token was seen; text after it is ignored
        self._pending = ""

    def feed(self, text: str) -> list[int]:
        """Return the ids 0..6560 that `text` completes."""
        text = self._pending + text
        tokens: list[int] = []
        consumed = 0
        for match in self._token.finditer(text):
            self.ended = self.ended or match[0] in self._ends
            if self.ended:
                break
            if int(match[1]) < SPEECH_VOCAB:
                tokens.append(int(match[1]))
            consumed = match.end()
        self._pending = self._unfinished_token(text[consumed:])
        return tokens

    def _unfinished_token(self, text: str) -> str:
        """Return the end of `text` that may begin a token; bounded, so that other text does not accumulate."""
        start = text.rfind("<")
        return text[start:] if start >= 0 and len(text) - start < self._longest else ""
