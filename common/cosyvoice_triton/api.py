"""The Python API: a client of a running server, and a server on this machine.

from cosyvoice_triton import Client, Server

with Server() as server, Client(server.address) as client:
    for text in ("Good morning.", "The train leaves from platform four."):
        for chunk in client.stream(text, voice="kumo"):
            play(chunk)  # float32 (N,), 24 kHz, while the server renders the rest
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosyvoice_triton import stacks
from cosyvoice_triton.background import BackgroundLoop, in_thread
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.grpc_client import AsyncConnection, served_model
from cosyvoice_triton.client.utterance import Pieces, Utterance, read_reference
from cosyvoice_triton.constants import GRPC_PORT, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.errors import is_overloaded
from cosyvoice_triton.server.installation import ServerError
from cosyvoice_triton.tasks import TaskScope
from cosyvoice_triton.text.pronunciation import pronunciations

if TYPE_CHECKING:
    from cosyvoice_triton.server.tritonserver import TritonServer

RETRY_SECONDS = 1.0  # until a request that found no place is sent again

__all__ = ["Client", "ClientError", "Server", "ServerError"]


class Client:
    """A connection to a speech server over gRPC: `with Client("localhost:8001") as client: client.speak("Hello.")`.

    address: HOST:PORT of Triton's gRPC endpoint. model: the stack's model that speaks; by default the one that the
    server has. Any number of threads may speak at the same time.
    """

    sample_rate = SAMPLE_RATE  # Hz, of all audio

    def __init__(self, address: str = f"localhost:{GRPC_PORT}", model: str | None = None) -> None:
        self.address = address
        self._model = model
        self._connection: AsyncConnection | None = None
        self._loop = BackgroundLoop("speech-client")

    def speak(self, text: str, **options: Any) -> np.ndarray:
        """Return the whole audio of `text`, float32 (N,) in -1..1; options and errors are those of `stream`."""
        return np.concatenate(list(self.stream(text, **options)))

    def stream(
        self,
        text: str,
        *,
        voice: str | None = None,
        reference: str | Path | np.ndarray | None = None,
        reference_text: str | None = None,
        reference_sample_rate: int = PROMPT_SAMPLE_RATE,
        instruct_text: str | None = None,
        pronunciation: Mapping[str, str] | None = None,
        source: str | Path | np.ndarray | Iterable[np.ndarray] | None = None,
        source_sample_rate: int = PROMPT_SAMPLE_RATE,
        timeout: float = 120.0,
        **parameters: int | float | str | bool,
    ) -> Iterator[np.ndarray]:
        """Yield the audio of `text` in chunks, float32 (N,) in -1..1, as the server renders them.

        voice: the name of a registered voice. reference: instead, a recording to clone, of 0.5 to 30 seconds: a file,
        or float32 (T,) at reference_sample_rate; reference_text: what it says, word for word. instruct_text: how to
        speak. pronunciation: words of the text and what is spoken for each. source: see `convert`. timeout: seconds
        until the answer must be complete. parameters: request parameters, such as seed=2 or language="de". Closing the
        iterator cancels the request.

        Where the server has as many listeners as it can serve, it waits for a place, within the timeout.

        ClientError if the server cannot be reached or refuses the request, ValueError for a value that cannot be sent.
        """
        if isinstance(reference, (str, Path)):
            recording = read_reference(Path(reference))
            reference, reference_sample_rate = recording.wav, recording.rate
        elif reference is not None and (reference.ndim != 1 or not np.issubdtype(reference.dtype, np.floating)):
            raise ValueError(
                f"reference is {reference.dtype} {reference.shape}, not float32 (T,) at {reference_sample_rate} Hz"
            )
        live = None
        if isinstance(source, (str, Path)):
            recording = read_reference(Path(source))
            source, source_sample_rate = recording.wav, recording.rate
        elif source is not None and not isinstance(source, np.ndarray):
            source, live = None, source
        if pronunciation:
            parameters["pronunciation"] = json.dumps(pronunciations(pronunciation), ensure_ascii=False)
        utterance = Utterance(
            text,
            reference,
            reference_text,
            parameters,
            voice,
            instruct_text,
            reference_sample_rate=reference_sample_rate,
            source=source,
            source_sample_rate=source_sample_rate,
            source_pieces=None if live is None else Pieces(np.concatenate),
        )
        return self._loop.iterate(self._received(utterance, timeout, live or ()))

    def convert(self, source: str | Path | np.ndarray | Iterable[np.ndarray], **options: Any) -> Iterator[np.ndarray]:
        """Yield speech in another voice, as `stream` does, with its words and its timing: no LLM is asked.

        source: a file or float32 (T,) at source_sample_rate (16 kHz), of 0.5 to 120 seconds, or an iterable of such
        arrays of any length, of which what is known is converted before the next one comes. options: the voice, as of
        `stream`.
        """
        return self.stream("", source=source, **options)

    async def _received(
        self, utterance: Utterance, timeout: float, live: Iterable[np.ndarray]
    ) -> AsyncGenerator[np.ndarray, None]:
        async with TaskScope() as tasks, aclosing(self._answered(utterance, timeout)) as parts:
            feeding = None if (pieces := utterance.source_pieces) is None else tasks.spawn(_fed(pieces, live))
            async for part in parts:
                yield part
            if feeding is not None:
                await feeding  # raises what `live` has raised

    async def _answered(self, utterance: Utterance, timeout: float) -> AsyncGenerator[np.ndarray, None]:
        if self._connection is None:
            self._connection = AsyncConnection(self.address)  # here, because it belongs to this loop
        if self._model is None:
            self._model = await served_model(self._connection.client, self.address)
        last, left = time.monotonic() + timeout, timeout
        while True:
            try:
                async with aclosing(self._connection.stream(self._model, utterance, "streaming", left)) as parts:
                    silent = True
                    async for part in parts:
                        if part.waveform.size:
                            silent = False
                            yield part.waveform
                if silent:
                    raise ClientError("the server ended the request without audio; see its log for the reason")
                return
            except ClientError as failure:
                # Only a whole request is refused as overloaded, before its first chunk.
                if not is_overloaded(str(failure)) or time.monotonic() + RETRY_SECONDS > last:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
            left = last - time.monotonic()

    def close(self) -> None:
        """Cancel the requests under way and close the connection; the client cannot be used afterwards."""
        self._loop.close(None if self._connection is None else self._connection.aclose)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _fed(pieces: Pieces[np.ndarray], live: Iterable[np.ndarray]) -> None:
    try:
        async for samples in in_thread(live):
            pieces.add(samples)
    finally:
        pieces.end()


class Server:
    """A speech server on this machine, on free ports: `with Server() as server: Client(server.address)`.

    models: the directory of the checkpoints, see `cosyvoice-triton prepare`; by default the demo voice. options: those
    of `cosyvoice_triton.server.options.StackOptions`, such as stack="unet" or settings={"max_streams": "4"}.

    Entering it takes the time to load the models; ServerError or ValueError if they cannot be loaded.
    """

    def __init__(self, models: str | Path | None = None, **options: Any) -> None:
        self._models = None if models is None else Path(models)
        self._options = options
        self._stack = ExitStack()
        self._triton: TritonServer | None = None

    @property
    def address(self) -> str:
        """Return HOST:PORT of its gRPC endpoint, once it is serving."""
        if self._triton is None:
            raise ServerError("the server has not been started: use it in `with Server() as server:`")
        return self._triton.grpc_url

    def __enter__(self) -> "Server":
        # Here, because a client does not need them.
        from cosyvoice_triton.demo_checkpoint import DEMO_SETTINGS
        from cosyvoice_triton.prepare import steps
        from cosyvoice_triton.server import mps
        from cosyvoice_triton.server.options import StackOptions, planned
        from cosyvoice_triton.server.rendering import render
        from cosyvoice_triton.server.tritonserver import Ports, TritonServer

        with ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cosyvoice-triton-")))
            if (models := self._models) is None:
                models = work / "models"
                steps.demo(models, self._options.get("stack", stacks.DEFAULT.name))
                self._options["settings"] = {**DEMO_SETTINGS, **self._options.get("settings", {})}
            options, _ = planned(StackOptions(models_dir=models, **self._options))
            options.require_files()
            render(options, work / "repository")
            stack.enter_context(mps.shared_gpu(work / "repository"))
            self._triton = stack.enter_context(TritonServer(work / "repository", ports=Ports(0, 0, 0)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._triton = None
        self._stack.close()
