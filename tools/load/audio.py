"""Audio files of a run, written beside it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.client.requests import ClientError, SpeechResult

UNWRITTEN = 64  # files that may wait


class AudioWriter:
    """Writes audio files in a thread of its own; `UNWRITTEN` of them may wait."""

    def __init__(self, directory: Path | None) -> None:
        """ClientError where the directory cannot be made: before the first request, not after the last."""
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClientError(f"cannot write to {directory}: {error}; choose another place with --log-dir") from None
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audio")
        self._places = asyncio.Semaphore(UNWRITTEN)
        self._pending: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None

    async def write(self, name: str, speech: SpeechResult) -> None:
        if self._directory is None:
            return
        await self._places.acquire()
        path = self._directory / f"{name}.wav"
        future = asyncio.get_running_loop().run_in_executor(self._thread, speech.save, path)
        self._pending.add(future)
        future.add_done_callback(self._written)

    def _written(self, future: asyncio.Future[None]) -> None:
        self._pending.discard(future)
        self._places.release()
        self._error = self._error or future.exception()

    async def finish(self) -> None:
        """Wait for the files; raises the first ClientError of them."""
        if self._pending:
            await asyncio.wait(self._pending)
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
