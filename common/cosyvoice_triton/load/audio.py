"""Audio files of a run, written in the background."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cosyvoice_triton.client.requests import ClientError, SpeechResult

MAX_PENDING = 64  # files waiting to be written


class AudioWriter:
    """Writes audio files in a thread; at most `MAX_PENDING` of them wait."""

    def __init__(self, directory: Path | None) -> None:
        """ClientError if the directory cannot be made, so that a run fails before its first request."""
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClientError(
                f"cannot write to {directory}: {error}; choose another directory with --log-dir"
            ) from None
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audio")
        self._slots = asyncio.Semaphore(MAX_PENDING)
        self._pending: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None

    async def write(self, name: str, speech: SpeechResult) -> None:
        if self._directory is None:
            return
        await self._slots.acquire()
        path = self._directory / f"{name}.wav"
        future = asyncio.get_running_loop().run_in_executor(self._thread, speech.save, path)
        self._pending.add(future)
        future.add_done_callback(self._written)

    def _written(self, future: asyncio.Future[None]) -> None:
        self._pending.discard(future)
        self._slots.release()
        self._error = self._error or future.exception()

    async def finish(self) -> None:
        """Wait for the files; raises the first ClientError."""
        if self._pending:
            await asyncio.wait(self._pending)
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
