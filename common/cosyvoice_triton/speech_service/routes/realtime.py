"""WS /v1/realtime: OpenAI's realtime protocol for a model that speaks: text in, audio out.

    client  session.update   conversation.item.create, retrieve, truncate, delete   response.create, replace, cancel
    server  session.created, updated   conversation.item.added, done, …   response.created, output_audio.delta, …, done

`response.replace` is not OpenAI's: its text, which may be empty, comes instead of what follows the segment that is
being generated. `response.replaced` then has the words that were spoken and the text that was dropped.

A response speaks one text, word for word: that of the `input` of response.create, else its `instructions`, else that of
the conversation's last item.
"""

import base64
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, WebSocket

from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import json_kind
from cosyvoice_triton.speech_service.audio.spoken import Word, text_of, until
from cosyvoice_triton.speech_service.bodies import SpeechRequest
from cosyvoice_triton.speech_service.errors import NOTHING, ApiError, invalid
from cosyvoice_triton.speech_service.limits import MAX_ID_CHARS, MAX_ITEMS, MAX_METADATA, NAME_CHARS
from cosyvoice_triton.speech_service.routes.realtime_response import Response, new_id
from cosyvoice_triton.speech_service.routes.sessions import SocketSessionBase
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import MAX_CHAR_BYTES
from cosyvoice_triton.text.cleaning import is_speakable

DELTA_BYTES = 1 << 15  # of audio in one event: 0.7 s; some clients refuse messages of a megabyte

_FORMATS = {"audio/pcm": "pcm", "audio/pcmu": "mulaw", "audio/pcma": "alaw"}
_TEXT_ONLY = "the model does not listen: send text with conversation.item.create"

router = APIRouter()
_Model = Annotated[
    str, Query(description="a served model", max_length=NAME_CHARS)
]  # for the document: the session reads it


@router.websocket("/v1/realtime")
async def realtime_socket(socket: WebSocket, model: _Model = "") -> None:
    """Serve one connection with any number of responses, one at a time."""
    await RealtimeSession.serve(socket)


class RealtimeSession(SocketSessionBase):
    """One client's settings and conversation, and the response that is being spoken."""

    def __init__(self, socket: WebSocket, service: Service) -> None:
        super().__init__(socket, service)
        self._id = new_id("sess")
        self._event: str | None = None  # the client's id of the message that is being handled
        self._config: dict[str, Any] = {"response_format": "pcm", "sample_rate": SAMPLE_RATE}
        self._items: list[dict[str, Any]] = []
        self._response: Response | None = None
        model = socket.query_params.get("model", "")
        if not model.startswith(("gpt-", "tts-")):  # OpenAI's stand for the default one
            self._config["model"] = model
        self.handlers = {
            "session.update": self._update,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.truncate": self._truncate_item,
            "conversation.item.delete": self._delete_item,
            "response.create": self._create_response,
            "response.replace": self._replace,
            "response.cancel": self._cancel,
            "input_audio_buffer.clear": lambda _: self._send("input_audio_buffer.cleared"),  # it is always empty
            **{
                kind: partial(self._refuse, kind) for kind in ("input_audio_buffer.append", "input_audio_buffer.commit")
            },
        }

    async def run(self) -> None:
        """Begin as the protocol wants it, then handle messages."""
        await self._send("session.created", session=self._session())
        await super().run()

    async def _handle(self, fields: dict[str, Any]) -> None:
        event = fields.get("event_id")
        self._event = event if _is_text(event, MAX_ID_CHARS) else None
        await super()._handle(fields)

    async def _update(self, fields: dict[str, Any]) -> None:
        config = self._updated(_object(fields, "session"))
        await self._check_voice(config)
        self._config = config
        await self._send("session.updated", session=self._session())

    async def _refuse(self, kind: str, _: dict[str, Any]) -> None:
        raise invalid(f"{kind}: {_TEXT_ONLY}", "type", "input_audio_not_supported")

    async def _retrieve_item(self, fields: dict[str, Any]) -> None:
        item = self._items[self._position(fields.get("item_id"), "retrieve")]
        await self._send("conversation.item.retrieved", item=self._shown(item))

    async def _delete_item(self, fields: dict[str, Any]) -> None:
        item = self._items.pop(self._position(fields.get("item_id"), "delete"))
        await self._send("conversation.item.deleted", item_id=item["id"])

    async def _truncate_item(self, fields: dict[str, Any]) -> None:
        """Keep of what was spoken the part that was heard, which the client knows."""
        at = {"content_index": fields.get("content_index", 0), "audio_end_ms": fields.get("audio_end_ms", 0)}
        if not all(isinstance(each, int) for each in at.values()):
            raise invalid("content_index and audio_end_ms must be integers", "audio_end_ms")
        item = self._items[self._position(fields.get("item_id"), "truncate")]
        if (words := self._words_of(item, at["audio_end_ms"] / 1000)) is not None:
            item["text"] = text_of(words)
            at |= {"words": words}
        await self._send("conversation.item.truncated", item_id=item["id"], **at)

    def _words_of(self, item: dict[str, Any], seconds: float) -> list[Word] | None:
        """Return the words of a spoken item until then; None if they are not known."""
        if (live := self._response) is not None and live.item is item:
            return live.words(seconds)
        known: list[Word] | None = item.get("words")
        return known and until(known, seconds)

    def _updated(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with what a message gives, if a request could be made with them. ApiError.

        What only models that listen and think have, such as tools and turn detection, changes nothing.
        """
        if given.get("type", "realtime") != "realtime":
            raise invalid(
                f"a session of the type {given['type']!r}: this service speaks, use 'realtime'", "session.type"
            )
        fields: dict[str, Any] = {name: given[name] for name in ("voice", "speed", "instructions") if name in given}
        self._checked(fields.get("instructions", ""), "instructions")
        output = _object(_object(given, "audio"), "output")
        fields |= {name: output[name] for name in ("voice", "speed") if name in output}
        if (kind := output.get("format")) is not None:
            how = kind if isinstance(kind, dict) else {"type": kind}
            name = how.get("type")
            if not isinstance(name, str) or name not in _FORMATS:
                raise invalid(f"the format {name!r} of the audio is not one of {', '.join(_FORMATS)}", "format")
            fields["response_format"] = _FORMATS[name]
            fields["sample_rate"] = how.get("rate", SAMPLE_RATE if _FORMATS[name] == "pcm" else None)
        modalities = given.get("output_modalities", ["audio"])
        if not isinstance(modalities, list) or "audio" not in modalities:
            raise invalid(f"modalities {modalities!r}: this model answers with audio", "output_modalities")
        config = {**self._config, **fields}
        self._service.encoder(self._parsed(config))
        return config

    async def _check_voice(self, config: dict[str, Any]) -> None:
        """Raise ApiError for a voice that neither this service nor the models know; not if they do not answer now."""
        wanted = self._parsed(config)
        if not wanted.voice_name or wanted.voice_name == self._config.get("voice"):
            return
        try:
            answer = await self._service.answer(wanted)
            if (utterance := answer.utterances[0]).reference is None:
                await self._service.dispatcher.check_voice(answer.model, utterance)
        except ApiError as error:
            if error.status == 400:
                raise

    def _session(self) -> dict[str, Any]:
        wanted = self._parsed(self._config)
        about = {"object": "realtime.session", "type": "realtime", "id": self._id, "instructions": wanted.instructions}
        return {**about, "model": wanted.model or self._service.default_model, **self._output(wanted)}

    def _output(self, wanted: SpeechRequest) -> dict[str, Any]:
        """Return how a session or a response sounds."""
        kind: dict[str, Any] = {"type": {kind: name for name, kind in _FORMATS.items()}[wanted.response_format]}
        if wanted.response_format == "pcm":
            kind["rate"] = self._service.encoder(wanted).rate
        how = {"voice": wanted.voice_name, "format": kind, "speed": wanted.speed}
        return {"output_modalities": ["audio"], "audio": {"output": how}}

    async def _create_item(self, fields: dict[str, Any]) -> None:
        item, after = _object(fields, "item"), fields.get("previous_item_id")
        name = item.get("id") or new_id("item")
        if not _is_text(name, MAX_ID_CHARS):
            raise invalid(f"the id of an item is a text of at most {MAX_ID_CHARS} characters", "item.id")
        if any(each["id"] == name for each in self._items):
            raise invalid(f"there is an item {name!r} already", "item.id", "item_create_duplicate_item_id")
        role = item.get("role", "user")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"role {role!r} of an item is not user, assistant or system", "item.role")
        text = self._text_of(item)
        known = {"id": name, "role": role, "text": text, "spoken": False}
        position = len(self._items)
        if after is not None:
            position = 0 if after == "root" else 1 + self._position(after)
        await self._add(known, position)

    async def _add(self, item: dict[str, Any], position: int, status: str = "completed") -> None:
        before = self._items[position - 1]["id"] if position else None
        self._keep(MAX_CHAR_BYTES * sum(len(each["text"]) for each in (*self._items, item)))
        self._items.insert(position, item)
        del self._items[:-MAX_ITEMS]
        await self._send("conversation.item.added", previous_item_id=before, item=self._shown(item, status))
        if status == "completed":
            await self._send("conversation.item.done", previous_item_id=before, item=self._shown(item))

    def _position(self, name: Any, action: str = "create") -> int:
        """Return where an item is in the conversation. ApiError."""
        for position, item in enumerate(self._items):
            if item["id"] == name:
                return position
        raise invalid(f"there is no item {str(name)[:MAX_ID_CHARS]!r}", "item_id", f"item_{action}_invalid_item_id")

    def _text_of(self, item: Any) -> str:
        """Return the text of a client's item. ApiError."""
        if not isinstance(item, dict) or (kind := item.get("type", "message")) not in ("message", "item_reference"):
            raise invalid("an item that is no message: there is nothing in it to speak", "item.type")
        if kind == "item_reference":
            return str(self._items[self._position(item.get("id"))]["text"])
        content, texts = item.get("content", []), []
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text", part.get("transcript")) if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise invalid(f"the content of an item has a part without text: {_TEXT_ONLY}", "item.content")
            texts.append(text)
        return self._checked(" ".join(texts), "item.content")

    def _checked(self, text: Any, where: str) -> str:
        """Return what is to be spoken. ApiError."""
        if not _is_text(text, limit := self._service.settings.max_input_chars):
            raise invalid(f"{where} is not a text of up to {limit} characters", where)
        return str(text)

    def _shown(self, item: dict[str, Any], status: str = "completed") -> dict[str, Any]:
        """Return an item as the client sees it; one that is being spoken has no content yet."""
        if item["spoken"]:
            part = {"type": "output_audio", "transcript": item["text"]}
        elif item["role"] == "assistant":
            part = {"type": "output_text", "text": item["text"]}
        else:
            part = {"type": "input_text", "text": item["text"]}
        content = [] if status == "in_progress" else [part]
        about = {"id": item["id"], "object": "realtime.item", "type": "message", "status": status}
        return about | {"role": item["role"], "content": content}

    async def _create_response(self, fields: dict[str, Any]) -> None:
        given = _object(fields, "response")
        if self._response is not None:
            raise ApiError(
                409,
                f"the response {self._response.id} is being spoken: wait for response.done, or cancel it",
                code="conversation_already_has_active_response",
            )
        items, instructions = given.pop("input", None), given.get("instructions")
        if items is not None:
            if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
                raise invalid(f"input is not a list of 1 to {MAX_ITEMS} items", "response.input")
            text = self._text_of(items[-1])
        elif instructions is not None:
            # LiveKit sends those of the session before those of the response.
            text = self._checked(given.pop("instructions"), "instructions")
            if session := self._config.get("instructions"):
                text = text.removeprefix(f"{session}\n")
        else:
            text = self._items[-1]["text"] if self._items and not self._items[-1]["spoken"] else ""
        if not text.strip():
            raise invalid(
                "there is nothing to speak: the text is that of input or instructions, or of the conversation's last "
                "item, if it is not spoken yet",
                "response",
                NOTHING,
            )
        wanted = self._parsed(self._updated(given), text)
        self._response = response = Response(wanted, _metadata(given.get("metadata", {})))
        await self._send("response.created", response=self._about(response, "in_progress"))
        await self._send("response.output_item.added", **_where(response), item=self._item_of(response, "in_progress"))
        await self._add(response.item, len(self._items), "in_progress")
        await self._send_part(response, "response.content_part.added", part={"type": "audio", "transcript": ""})
        self._wake()

    async def _speak_next(self) -> bool:
        if (response := self._response) is None:
            return False
        try:
            response.wanted.timestamps = "word"
            response.answer = await self._service.answer(response.wanted)
            self._service.outcomes.begin(response.id, response.answer)
            await self._send_part(response, "response.output_audio_transcript.delta", delta=response.wanted.input)
            async with aclosing(self._service.dispatcher.encoded(response.answer)) as parts:
                async for part in parts:
                    for begin in range(0, len(part), DELTA_BYTES):
                        delta = base64.b64encode(part[begin : begin + DELTA_BYTES]).decode()
                        await self._send_part(response, "response.output_audio.delta", delta=delta)
                    await self._tell_replaced(response)
            await self._tell_replaced(response)
            if response.waiting is not None:  # it came after the last segment
                await self._send_error(_not_active("replace"))
        except ApiError as error:
            await self._end(response, "failed", {"error": error.body["error"]})
        else:
            await self._end(response, "completed", None)
        finally:  # also where the connection is gone
            if not response.ending and response.answer is not None:
                self._service.outcomes.end(response.id, response.answer, "gone")
        return True

    def _live(self, name: Any, action: str) -> Response:
        """Return the response that is being spoken. ApiError for another one's id."""
        response = self._response
        if response is None or response.ending or name not in (None, response.id):
            raise _not_active(action)
        return response

    async def _replace(self, fields: dict[str, Any]) -> None:
        """Speak another text, or none, instead of what follows the segment that is being generated."""
        response = self._live(fields.get("response_id"), "replace")
        text = self._checked(fields.get("text"), "text")
        self._checked(response.spoken() + text, "text")
        heard = fields.get("audio_end_ms")
        if not isinstance(heard, (int, type(None))):
            raise invalid("audio_end_ms must be an integer", "audio_end_ms")
        utterances: tuple[Utterance, ...] = ()
        if is_speakable(text):
            wanted = self._parsed(response.wanted.model_dump(exclude_unset=True), text)
            utterances = (await self._service.answer(wanted)).utterances
        answer = self._live(response.id, "replace").answer
        if answer is None:
            raise _not_active("replace")
        if response.waiting is not None:
            await self._send_part(response, "response.replaced", words=response.words(), dropped=response.waiting)
        response.replace(answer, text, utterances, None if heard is None else heard / 1000)

    async def _tell_replaced(self, response: Response) -> None:
        if (about := response.replaced) is not None:
            response.replaced = None
            response.item["text"] = response.wanted.input
            await self._send_part(response, "response.replaced", **about)

    async def _cancel(self, fields: dict[str, Any]) -> None:
        """Cancel the response (barge-in): none of its audio is sent after its response.done."""
        response = self._live(fields.get("response_id"), "cancel")
        await self.stop_speaking()
        await self._end(response, "cancelled", {"reason": "client_cancelled", "words": response.words()})

    async def _end(self, response: Response, status: str, details: dict[str, Any] | None) -> None:
        response.ending = True
        whole = "completed" if status == "completed" else "incomplete"
        text, item = response.wanted.input, self._item_of(response, whole)
        response.item["words"] = response.words()
        if response.answer is not None:
            ended = {"completed": "completed", "cancelled": "gone"}.get(status, "failed")
            self._service.outcomes.end(response.id, response.answer, ended)
        await self._send_part(response, "response.output_audio.done")
        await self._send_part(response, "response.output_audio_transcript.done", transcript=text)
        await self._send_part(response, "response.content_part.done", part={"type": "audio", "transcript": text})
        await self._send("response.output_item.done", **_where(response), item=item)
        await self._send("conversation.item.done", item=item)
        about = self._about(response, status) | {"output": [item], "usage": response.usage()}
        if details is not None:
            about["status_details"] = {"type": status, **details}
        self._response = None  # the client may answer response.done with the next one
        await self._send("response.done", response=about | (response.answer.with_warnings if response.answer else {}))

    def _about(self, response: Response, status: str) -> dict[str, Any]:
        about: dict[str, Any] = {"object": "realtime.response", "id": response.id, "status": status, "output": []}
        about |= {"status_details": None, "usage": None, "metadata": response.metadata}
        return about | self._output(response.wanted)

    def _item_of(self, response: Response, status: str) -> dict[str, Any]:
        return self._shown({**response.item, "text": response.wanted.input}, status)

    async def _send_part(self, response: Response, kind: str, **fields: Any) -> None:
        await self._send(kind, **_where(response), item_id=response.item["id"], content_index=0, **fields)

    async def _send(self, kind: str, **fields: Any) -> None:
        await super()._send(kind, event_id=new_id("event"), **fields)

    async def _send_error(self, error: ApiError) -> None:
        await self._send("error", error={**error.body["error"], "event_id": self._event})


def _not_active(action: str) -> ApiError:
    failed = "Cancellation" if action == "cancel" else "Replacement"  # LiveKit knows OpenAI's "Cancellation failed"
    return invalid(f"{failed} failed: no such response is being spoken", "response_id", f"response_{action}_not_active")


def _is_text(value: Any, chars: int) -> bool:
    """Return whether it is a text of at most so many characters that can be sent back."""
    return isinstance(value, str) and len(value) <= chars and not any("\ud800" <= char <= "\udfff" for char in value)


def _where(response: Response) -> dict[str, Any]:
    return {"response_id": response.id, "output_index": 0}


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object in a field; an empty one without the field. ApiError."""
    if not isinstance(value := fields.get(name, {}), dict):
        raise invalid(f"{name} is {json_kind(value)}, not a JSON object", name)
    return value


def _metadata(given: Any) -> dict[str, str]:
    pairs, name_chars, value_chars = MAX_METADATA
    fits = isinstance(given, dict) and len(given) <= pairs
    if not fits or not all(_is_text(k, name_chars) and _is_text(v, value_chars) for k, v in given.items()):
        raise invalid(
            f"metadata is not an object of up to {pairs} texts of {value_chars} characters", "response.metadata"
        )
    return dict(given)
