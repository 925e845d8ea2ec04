"""WS /v1/audio/speech/stream: text arrives in pieces, as an LLM writes it; audio is sent per sentence; barge-in.

    client  session.config {mode, and fields of /v1/audio/speech}   input.text {text}
            input.replace {text, played_ms}   input.done   input.cancel {played_ms}   session.close
    server  audio.start {utterance_index, sentence_index, sentence_text, format, sample_rate}, binary frames, audio.done
            warning {utterance_index, sentence_index, message}
            audio.timestamps {utterance_index, sentence_index, segments}
            session.done {utterance_index, total_sentences}   error {error}
            input.replaced {utterance_index, words, dropped}   audio.cancelled {utterance_index, words}

A sentence is spoken as soon as the next one starts. Each sentence is encoded separately: with a container (mp3, wav, …)
it is a file of its own; pcm, the default here, continues seamlessly. In the mode "tokens" the whole utterance takes the
place of a sentence: the model gets the text while it is being written.

`input.replace` takes back what no sentence that is spoken has: its text, which may be empty, comes instead. `words` are
those that were spoken, with their times in the utterance's audio: by `played_ms` of it, without that by what was sent.
"""

import asyncio
import re
from collections import deque
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, WebSocket

from cosyvoice_triton.client.utterance import Pieces
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.spoken import Word, spoken_words
from cosyvoice_triton.speech_service.audio.timestamps import Detail
from cosyvoice_triton.speech_service.errors import ApiError, invalid
from cosyvoice_triton.speech_service.limits import MAX_WAITING_CHARS, MAX_WAITING_UTTERANCES
from cosyvoice_triton.speech_service.routes.sessions import SocketSessionBase
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.text.cleaning import is_speakable
from cosyvoice_triton.text.markup import without_voices
from cosyvoice_triton.text.segments import WINDOW, SentenceSplitter

MAX_SAID = 256  # sentences of an utterance whose words are known

_MODES = "sentences", "tokens"
# Fields of /v1/audio/speech that a session has not, and what it has instead.
_NOT_OF_A_SESSION = {
    "input": "send input.text",
    "stream_format": "audio is sent in binary messages",
    "subtitles": "use timestamps",
    "duration": "its sentences have their own",
}
_SSML_BEGINS, _SSML_ENDS = re.compile(r"\s*(?:<speak|<\?xml)\b"), "</speak>"
_LONE_SURROGATE = "text has half of a surrogate pair, whose other half did not follow"

router = APIRouter()


@router.websocket("/v1/audio/speech/stream")
async def speech_socket(socket: WebSocket) -> None:
    """Serve one connection with any number of utterances."""
    await SocketSession.serve(socket)


class SocketSession(SocketSessionBase):
    """One client's text so far, and the sentences that are still to be spoken."""

    def __init__(self, socket: WebSocket, service: Service) -> None:
        super().__init__(socket, service)
        self._config: dict[str, Any] = {"response_format": "pcm"}
        self._by_tokens = False  # the mode
        self._pieces: Pieces[str] | None = None  # of the utterance in the mode "tokens"
        self._half = ""  # of a surrogate pair, which a client that cuts text by UTF-16 units may send in two pieces
        self._splitter = SentenceSplitter()
        self._document = ""  # SSML that has not ended, which is spoken as one sentence
        # Complete sentences, or all of the utterance; None where the client has sent input.done.
        self._waiting: deque[str | Pieces[str] | None] = deque()
        self._waiting_chars = 0  # of all of them
        self._utterance = 0
        self._sentences = 0  # spoken so far in this utterance
        self._shown: Detail | None = None  # of what is being spoken
        self._voice: dict[str, str] = {}  # request fields for the voice that the utterance has changed to
        # Of the utterance: where each sentence begins in its audio, in seconds, its text and its answer.
        self._said: deque[tuple[float, str, SpeechAnswer]] = deque(maxlen=MAX_SAID)
        self.handlers = {
            "session.config": self._configure,
            "input.text": self._add_text,
            "input.done": self._finish,
            "input.cancel": self._cancel,
            "input.replace": self._replace,
            "session.close": self._close,
        }

    async def _configure(self, fields: dict[str, Any]) -> None:
        """Set the request fields of later sentences. Not during an utterance, which would change its voice."""
        if self._unfinished or self._waiting or self._speaking or self._pieces:
            raise invalid("session.config during an utterance: send it before input.text or after session.done")
        if (mode := fields.pop("mode", None)) is None:
            mode = _MODES[0]
        if mode not in _MODES:
            raise invalid(f"mode must be {' or '.join(_MODES)}, not {mode!r}", "mode")
        config = {"response_format": "pcm", **fields}
        wanted = self._parsed(config)
        for name, instead in _NOT_OF_A_SESSION.items():
            if (value := fields.get(name)) is not None:
                raise invalid(f"{name} {value!r} of a WebSocket: {instead}", name)
        self._service.encoder(wanted)
        self._keep(len(wanted.ref_audio))
        self._config, self._by_tokens = config, mode == "tokens"

    async def _add_text(self, fields: dict[str, Any]) -> None:
        if not isinstance(text := fields.get("text"), str):
            raise invalid("input.text has no text", "text")
        half, self._half = self._half, ""
        text, self._half = _joined(half + text)
        if self._by_tokens:
            self._add_piece(text)
            return
        if len(text) + len(self._unfinished) + self._waiting_chars > MAX_WAITING_CHARS:
            raise ApiError(
                429, f"more than {MAX_WAITING_CHARS} characters are waiting to be spoken", code="too_much_text"
            )
        if len(text) <= WINDOW:
            sentences = self._complete(text)
        else:  # in a thread: a hostile text takes up to a second, in steps of milliseconds
            sentences = await asyncio.to_thread(self._complete, text)
        self._queue(sentences)
        if len(self._unfinished) > (limit := self._service.settings.max_input_chars):
            self._drop_unfinished()
            raise invalid(f"a sentence has more than {limit} characters: it is not spoken", "text")

    def _add_piece(self, piece: str) -> None:
        if self._pieces is None:
            self._pieces = Pieces("".join)
            self._waiting.append(self._pieces)
            self._wake()
        if self._pieces.ended:
            raise invalid("input.text before session.done: in the mode tokens, an utterance ends before the next one")
        if not self._speaking:
            raise invalid("the utterance failed: end it with input.done or input.cancel")
        if self._pieces.length + len(piece) > (limit := self._service.settings.max_input_chars):
            raise invalid(f"the utterance has more than {limit} characters: this piece is not spoken", "text")
        self._pieces.add(piece)

    def _complete(self, text: str) -> list[str]:
        documents: list[str] = []
        while _SSML_BEGINS.match(begun := self._unfinished + text):
            self._drop_unfinished()
            document, end, text = begun.partition(_SSML_ENDS)
            if not end:
                self._document = document
                return documents
            documents.append(document.strip() + end)
        text, self._document = self._document + text, ""  # "<speak" may have been the beginning of another word
        return documents + [sentence.strip() for sentence in self._splitter.push(text) if is_speakable(sentence)]

    async def _finish(self, _: dict[str, Any]) -> None:
        if self._waiting.count(None) >= MAX_WAITING_UTTERANCES:
            raise ApiError(
                429,
                f"{MAX_WAITING_UTTERANCES} utterances are waiting to be spoken: wait for session.done",
                code="too_much_text",
            )
        rest, half = self._unfinished, self._half
        self._drop_unfinished()
        self._half = ""
        self._queue([rest.strip()] if is_speakable(rest) else [])
        if self._pieces is not None:
            self._pieces.end()
        self._waiting.append(None)
        self._wake()
        if half:
            raise invalid(_LONE_SURROGATE, "text")

    def _queue(self, sentences: list[str]) -> None:
        self._waiting.extend(sentences)
        self._waiting_chars += sum(map(len, sentences))
        if self._waiting:
            self._wake()

    @property
    def _unfinished(self) -> str:
        return self._document + self._splitter.unfinished

    def _drop_unfinished(self) -> None:
        self._document = ""
        self._splitter.finish()

    async def _speak_next(self) -> bool:
        """Speak a waiting sentence, or end an utterance for which input.done was received."""
        if not self._waiting:
            return False
        if (sentence := self._waiting.popleft()) is None:
            await self._end_utterance()
        else:
            self._waiting_chars -= len(sentence) if isinstance(sentence, str) else 0
            await self._speak_sentence(sentence)
        return True

    async def _end_utterance(self) -> None:
        done = {"utterance_index": self._utterance, "total_sentences": self._sentences}
        self._utterance, self._sentences = self._utterance + 1, 0
        self._pieces, self._voice = None, {}
        self._said.clear()
        await self._send("session.done", **done)

    async def _speak_sentence(self, sentence: str | Pieces[str]) -> None:
        before = self._voice
        if isinstance(sentence, str):
            rest, name = without_voices(sentence)
            if name:  # also of the sentences that follow
                self._voice = {"voice": name, "ref_audio": "", "ref_text": ""}
                if not is_speakable(rest):
                    return
        index = {"utterance_index": self._utterance, "sentence_index": self._sentences}
        self._sentences += 1
        text = sentence if isinstance(sentence, str) else ""
        await self._send_answer(index, self._opened(sentence, text, before), sentence_text=text)

    async def _opened(self, sentence: str | Pieces[str], text: str, voice: dict[str, str]) -> SpeechAnswer:
        wanted = self._parsed({**self._config, **voice}, text or ".")
        self._shown, wanted.timestamps = wanted.timestamps, "word"
        answer = await self._service.answer(wanted)
        self._said.append((self._seconds_said(), text, answer))
        if isinstance(sentence, Pieces):
            answer.utterances = (replace(answer.utterances[0], target_text="", pieces=sentence),)
        return answer

    async def _send_about(self, answer: SpeechAnswer, index: dict[str, int]) -> None:
        segments = answer.new_segments()
        if self._shown == "segment":
            segments = [{name: each[name] for name in ("text", "start", "end")} for each in segments]
        if segments and self._shown:
            await self._send("audio.timestamps", **index, segments=segments)

    def _seconds_said(self) -> float:
        """Return the seconds of audio of the utterance's sentences so far."""
        if not self._said:
            return 0.0
        begin, _, last = self._said[-1]
        assert last.timestamps is not None
        return begin + last.samples / SAMPLE_RATE / last.timestamps.speed

    def _words(self, seconds: float | None) -> list[Word]:
        """Return the utterance's words that were spoken until then, with their times in its audio."""
        words: list[Word] = []
        for begin, text, answer in self._said:
            for word in spoken_words(text, answer, None if seconds is None else seconds - begin):
                at = {name: round(begin + word[name], 3) for name in ("start", "end")}
                words.append({"word": word["word"], **at})
        return words

    async def _replace(self, fields: dict[str, Any]) -> None:
        """Drop the utterance's text of which no sentence is spoken yet, and speak another one instead, if any."""
        seconds = _seconds(fields)
        if not isinstance(text := fields.get("text"), str):
            raise invalid("input.replace has no text; an empty one only drops what waits", "text")
        if self._by_tokens:
            raise invalid("input.replace in the mode tokens: the model has the text; use input.cancel")
        if len(text) > (limit := self._service.settings.max_input_chars):
            raise invalid(f"input.replace has more than {limit} characters", "text")
        waiting, ended = list(self._waiting), None in self._waiting
        own = waiting.index(None) if ended else len(waiting)
        dropped = [str(each) for each in waiting[:own]] + ([] if ended else [self._unfinished])
        later = waiting[own:]
        if not ended:
            self._drop_unfinished()
            self._half = ""
        elif is_speakable(text):  # all of it: the utterance's text has ended
            splitter = SentenceSplitter()
            new = [*splitter.push(text), splitter.finish()]
            later = [*(each.strip() for each in new if is_speakable(each)), *later]
        self._waiting = deque(later)
        self._waiting_chars = sum(len(each) for each in later if isinstance(each, str))
        about = {"utterance_index": self._utterance, "words": self._words(seconds)}
        await self._send("input.replaced", **about, dropped=" ".join(filter(None, dropped)))
        if not ended:
            await self._add_text(fields)
        elif self._waiting:
            self._wake()

    async def _cancel(self, fields: dict[str, Any]) -> None:
        """Discard all text so far (barge-in); no audio of it is sent after the answer to this message."""
        seconds = _seconds(fields)
        self._waiting.clear()
        self._waiting_chars, self._half = 0, ""
        self._drop_unfinished()
        await self.stop_speaking()
        self._pieces, self._voice = None, {}
        cancelled, self._utterance, self._sentences = self._utterance, self._utterance + 1, 0
        words = self._words(seconds)
        self._said.clear()
        await self._send("audio.cancelled", utterance_index=cancelled, words=words)

    async def _close(self, _: dict[str, Any]) -> None:
        await self._cancel({})
        await super()._close({})


def _seconds(fields: dict[str, Any]) -> float | None:
    """Return how much of the utterance's audio was heard; None if the client does not say. ApiError."""
    played = fields.get("played_ms")
    if played is not None and (isinstance(played, bool) or not isinstance(played, (int, float)) or not played >= 0):
        raise invalid(f"played_ms {str(played)[:80]!r} is not a number of milliseconds from 0 on", "played_ms")
    return None if played is None else played / 1000


def _joined(text: str) -> tuple[str, str]:
    """Return `text` with its surrogate pairs as characters, and the half of one at its end. ApiError for other
    halves."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
    text = text.removesuffix(half) if half else text
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise invalid(_LONE_SURROGATE, "text")
    return text, half
