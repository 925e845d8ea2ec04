"""A text that is still being written, and its speech, in turns: the LLM starts before it knows the whole text.

    sos  5 text ids  15 speech ids  5 text ids  15 speech ids  ...  rest of the text  task  speech ids  end

CosyVoice2 and CosyVoice3 are trained on such sequences, too. The voice's transcript and speech tokens come first in the
same form, then blocks of the text and of generated speech. After 15 speech ids the LLM gives the token *fill*: give me
more text. It is not part of the sequence, and its place is known, so it is never sampled here: a block is a request for
exactly 15 speech tokens that continues the sequence so far. So any engine and server that takes token ids can do it, a
request never waits for text, and nothing is kept in the LLM between two blocks.

Source: `inference_bistream` of upstream's `Qwen2LM` and `CosyVoice3LM`; the sequence equals theirs, including the token
before the last fill, which they feed twice.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from cosyvoice_triton.constants import MAX_STREAM_TOKENS
from cosyvoice_triton.llm.interface import MAX_SEED, FinishReason, LLMPrompt, Sampling, SpeechLM, TokenChunk
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.text.cleaning import is_speakable, strip_control_tokens

TEXT_BLOCK, SPEECH_BLOCK = 5, 15
LONGEST_WORD = 64  # characters; of a longer one the beginning is not held back

# Where a token may end, whatever comes next. The official vocabulary has tokens of a mark and one character ("，在"),
# of two kanji and the kana after them ("気持ち"), and of a part of a Chinese character and up to two whole ones. So two
# characters are held back. Between kana no cut is certain: "ありがとうございました" is one token.
_HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"
_CUT = re.compile(rf"(?<=\S)(?= )|(?<=[。，！？、；：])(?=..)|(?<={_HAN})(?={_HAN}{{2}})")


class Interleaving:
    """The sequence of one text.

    ids: what the LLM continues next. due: speech tokens that it is to generate before more text, in 1..SPEECH_BLOCK.
    """

    def __init__(
        self, sos_id: int, task_id: int, system: Sequence[int], prompt_text: Sequence[int], prompt_speech: Sequence[int]
    ) -> None:
        """`system` has the ids of CosyVoice3's system words and instruction up to the token that ends them, or none.
        prompt_text, prompt_speech: ids of the voice's transcript, or of CosyVoice2's instruction, and of its speech.
        All are ids of the LLM."""
        self.ids = [sos_id, *system]
        self.due = SPEECH_BLOCK - len(prompt_speech) % SPEECH_BLOCK
        self._task_id = task_id
        self._text = list(prompt_text)  # not in ids yet
        self._speech = list(prompt_speech)  # the same
        self._spoke = False

    def add(self, text_ids: Sequence[int]) -> bool:
        """Add text, of which at most one block is used.

        Returns whether `due` speech tokens are to be generated now, see `spoke`; otherwise more text is needed.
        """
        self._text += text_ids
        while self._speech and len(self._text) >= TEXT_BLOCK:
            self._use_text()
            self.ids += self._speech[:SPEECH_BLOCK]
            del self._speech[:SPEECH_BLOCK]
        if self._speech:
            return False
        # A voice's last block, and CosyVoice3's system words, are continued before there is more text.
        if self._spoke or len(self.ids) == 1:
            if len(self._text) < TEXT_BLOCK:
                return False
            self._use_text()
        return True

    def spoke(self, speech_ids: Sequence[int]) -> None:
        """Add the generated ids of a block; fewer than `due` if the LLM ended it early."""
        self.ids += speech_ids
        self.due = SPEECH_BLOCK
        self._spoke = True

    def finish(self) -> None:
        """End the text: what the LLM generates after this is the rest of the speech.

        Prompt speech for which there was no text is left out.
        """
        again = self.ids[-1:] if self._spoke else []
        self.ids += [*again, *self._text, self._task_id]
        self._text.clear()

    def _use_text(self) -> None:
        self.ids += self._text[:TEXT_BLOCK]
        del self._text[:TEXT_BLOCK]


class WordSplitter:
    """Gives the words of a text in pieces that are complete, so that each is tokenized as in the whole text.

    Without control tokens and surplus whitespace; otherwise the text stays as it is written. ids: the tokenizer.
    """

    def __init__(self, ids: Callable[[str], Sequence[int]]) -> None:
        self._ids = ids
        self._rest = ""
        self._begun = False  # some text was given

    def push(self, piece: str) -> str:
        """Return the words that `piece` completes; "" if it completes no word."""
        self._rest = re.sub(r"\s+", " ", self._rest + piece)
        whole, places = list(self._ids(self._rest)), [match.start() for match in _CUT.finditer(self._rest)]
        cut = next((at for at in reversed(places) if self._apart(at) == whole), 0)
        cut = max(cut, len(self._rest) - LONGEST_WORD)
        part, self._rest = self._rest[:cut], self._rest[cut:]
        return self._cleaned(part)

    def finish(self) -> str:
        """Return the last word."""
        part, self._rest = self._rest, ""
        return self._cleaned(part)

    def _apart(self, at: int) -> list[int]:
        return [*self._ids(self._rest[:at]), *self._ids(self._rest[at:])]

    def _cleaned(self, part: str) -> str:
        part = re.sub(r" +", " ", strip_control_tokens(part)).rstrip()
        if not self._begun:
            part = part.lstrip()
        self._begun = self._begun or bool(part)
        return part


class InterleavedSpeech:
    """The speech of one text that arrives in pieces, in the voice of `prompt`, whose own target text is not used; at
    most `limit` tokens. Any LLM that takes token ids generates it, by one request after another."""

    def __init__(
        self, llm: SpeechLM, tokenizer: LLMTokenizer, prompt: LLMPrompt, sampling: Sampling, limit: int | None = None
    ) -> None:
        system, prompt_text = tokenizer.prompt_ids(prompt)
        prompt_speech = tokenizer.to_llm_ids(prompt.prompt_tokens).tolist()
        self._sequence = Interleaving(tokenizer.sos_id, tokenizer.task_id, system, prompt_text, prompt_speech)
        self._llm = llm
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._most = min(limit or MAX_STREAM_TOKENS, MAX_STREAM_TOKENS)
        self._text = ""  # so far
        self._generated: list[int] = []  # speech ids 0..6560
        self._reason: FinishReason | None = None  # why the last request ended

    async def generate(self, pieces: AsyncIterator[str]) -> AsyncGenerator[TokenChunk, None]:
        """Yield the speech of `pieces`. Raises what they and the LLM raise, and ValueError if the text is empty."""
        async with aclosing(self._text_ids(pieces)) as text_ids:
            async for text_id in text_ids:
                if self._sequence.add([text_id]):
                    due = min(self._sequence.due, self._most - len(self._generated))
                    async with aclosing(self._continue(due, due)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    if len(self._generated) == self._most:
                        yield TokenChunk([], "length")
                        return
        if not is_speakable(self._text):
            raise ValueError(f"target_text has nothing to speak: {self._text[:80]!r}")
        self._sequence.finish()
        ended = False
        while not ended:
            done = len(self._generated)
            asked = min(self._sampling.max_tokens, self._most - done)
            least = min(asked, max(0, self._sampling.min_tokens - done))
            async with aclosing(self._continue(asked, least)) as chunks:
                async for chunk in chunks:
                    yield chunk
            # Fewer than asked for are the most for a text of this length.
            most = len(self._generated) < done + asked or len(self._generated) == self._most
            ended = most or self._reason == "stop"
        yield TokenChunk([], self._reason)

    async def _text_ids(self, pieces: AsyncIterator[str]) -> AsyncGenerator[int, None]:
        """Yield the ids of the text, which is tokenized word by word."""
        words = WordSplitter(self._tokenizer.text_ids)
        async for piece in pieces:
            for text_id in self._ids_of(words.push(piece)):
                yield text_id
        for text_id in self._ids_of(words.finish()):
            yield text_id

    def _ids_of(self, words: str) -> list[int]:
        self._text += words
        return self._tokenizer.text_ids(words)

    async def _continue(self, max_tokens: int, min_tokens: int) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of one request to the LLM, which continues the sequence."""
        sampling, done = self._sampling, len(self._generated)
        seed = None if sampling.seed is None else (sampling.seed + done) % (MAX_SEED + 1)
        part = replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed)
        prompt = LLMPrompt(self._text, generated=self._generated, ids=self._sequence.ids)
        async with aclosing(self._llm.generate(prompt, part)) as chunks:
            async for tokens, reason in chunks:
                self._generated += tokens
                self._reason = reason
                yield TokenChunk(tokens)
        self._sequence.spoke(self._tokenizer.to_llm_ids(self._generated[done:]).tolist())
