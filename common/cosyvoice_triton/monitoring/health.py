"""Whether the models still do their work and take new requests: what they and the process that runs tritonserver tell
each other by files, because that needs no port, lock or thread in a process that Triton owns.

A model proves that it works with every request that succeeds. Without one for TEST_SECONDS, or after an unexpected
error, it tests itself: a small job through its own queue and engine. The result is published with the model's metrics,
whose file also shows by its changes that the process is not stopped. If the process cannot recover, a file names the
reason.

Triton cannot drain models that call each other: on SIGTERM it refuses their calls too, and every stream in progress
fails. So it gets SIGTERM only after the last request has ended, and until then the orchestrators refuse new ones.
"""

import ctypes
import faulthandler
import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cosyvoice_triton.errors import UnavailableError, is_fatal
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.environment import METRICS_DIRECTORY, path_of
from cosyvoice_triton.monitoring.metrics import ENDING, Metric, MetricsFile, Samples, Values, samples_of

logger = logging.getLogger(__name__)

TEST_SECONDS = 10.0  # an idle model passes two tests before it counts as not ready (server/watch.py)
POLL_SECONDS = 1.0
PERIOD_SECONDS = 0.25  # so at least once between two checks of the server or of a drain, which are 0.5 s apart
RETURN_SECONDS = 30.0  # between two times that freed memory is given back
FAILED = ".failed"  # ending of the file that names the reason
NOTICE_BYTES = 1024  # of a reason, at most
STACKS_SIGNAL = signal.SIGUSR1  # a model writes the Python stacks of all its threads to the log

SUCCESS_AGE = Metric(
    "tts_model_success_age_seconds", "Seconds since the model last answered a request or passed its own test", "gauge"
)
FAILING = Metric(
    "tts_model_failing",
    "1 if the model has failed its own test and has done nothing since, or if the server goes on without it",
    "gauge",
)


class Health:
    """When the model of this process last did its work. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._succeeded_at = clock()
        self._failing = False
        self._suspected = False

    def succeeded(self) -> None:
        """Note that a request has been answered."""
        self._succeeded_at = self._clock()
        self._failing = self._suspected = False

    def suspect(self) -> None:
        """Note an unexpected error: the model tests itself soon."""
        self._suspected = True

    def test_if_due(self, test: Callable[[], object], model: str) -> None:
        """Run `test` after an unexpected error or TEST_SECONDS without a success. It may block as long as it needs."""
        if not self._suspected and self._clock() - self._succeeded_at < TEST_SECONDS:
            return
        self._suspected = False
        try:
            test()
        except BaseException as error:  # of any kind: the thread that tests must go on
            if is_fatal(error):
                report_failure(model, error)
            elif isinstance(error, UnavailableError):  # full: the requests that fill it prove that it works, or do not
                logger.info("%s cannot test itself now: %s", model, error)
            else:
                self._failing = self._suspected = True
                logger.exception("%s has failed its own test", model)
        else:
            self.succeeded()

    def values(self) -> Values:
        """Return the health as metrics."""
        return {SUCCESS_AGE: round(self._clock() - self._succeeded_at, 3), FAILING: int(self._failing)}


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed() -> None:
    """Give freed memory that the C library keeps back to the system; takes 20 to 50 ms for 400 MiB on a free core.

    glibc keeps what is freed below the last block in use. Tensors have hundreds of sizes and leave its heap in pieces:
    token2wav then holds two to three times the memory that it uses, and more with every new size
    (docs/results/operations.md). Does nothing with a C library that cannot.
    """
    if _trim is not None:
        _trim(0)


health = Health()  # of this process: Triton runs each model instance in one of its own


class ModelMonitor:
    """Publishes the health and the metrics of a model instance until `close`, and gives back the memory that it frees.
    Made once the model is loaded.

    test: a small job that raises if the model cannot do its work, in a thread of its own. read: the model's metrics.
    args: those that Triton passes to `initialize`. Does nothing if no process reads what is published.
    """

    def __init__(
        self, args: Mapping[str, str], *, test: Callable[[], object], read: Callable[[], Values] = dict
    ) -> None:
        self._test, self._read = test, read
        self._model = args["model_name"]
        self._labels = {"model": self._model, "model_instance": args["model_instance_name"]}
        self._ended = threading.Event()
        self._publisher: threading.Thread | None = None
        health.succeeded()  # it has just been loaded
        # Before the first metrics, which tell the server that the process has this.
        faulthandler.register(STACKS_SIGNAL)
        if (directory := path_of(METRICS_DIRECTORY)) is None:
            return
        failure_of(directory, self._model).reserve()
        # So that every sample exists before the first request.
        file = MetricsFile(directory / f"{args['model_instance_name']}{ENDING}", self._samples())
        self._publisher = threading.Thread(target=self._publish, args=(file,), name="metrics", daemon=True)
        self._publisher.start()
        gc.collect()
        gc.freeze()  # loaded objects stay: to scan them again would stop all threads for a tenth of a second
        threading.Thread(target=self._check, name="health", daemon=True).start()

    def close(self) -> None:
        """Stop publishing, and send the last spans."""
        self._ended.set()
        if self._publisher:
            self._publisher.join()
        tracing.flush()

    def _publish(self, file: MetricsFile) -> None:
        """Write the current numbers regularly. It never raises, because metrics must not end a model; a failure is
        logged once, until the next success."""
        fails = False
        while not self._ended.wait(PERIOD_SECONDS):
            try:
                file.write(self._samples())
                fails = False
            except Exception:
                if not fails:
                    logger.exception("cannot write the metrics")
                fails = True
        file.close()

    def _samples(self) -> Samples:
        return samples_of(self._labels, {**self._read(), **health.values()})

    def _check(self) -> None:
        returned_at = time.monotonic()
        while not self._ended.wait(POLL_SECONDS):
            health.test_if_due(self._test, self._model)
            if time.monotonic() - returned_at >= RETURN_SECONDS:
                return_freed()
                returned_at = time.monotonic()


def report_failure(model: str, error: BaseException) -> None:
    """Log why this process cannot recover, and tell the process that runs tritonserver, which ends it."""
    logger.critical("%s has to be restarted: %s: %s", model, type(error).__name__, error)
    try:
        failure_of(path_of(METRICS_DIRECTORY), model).give(str(error).strip().partition("\n")[0])
    except OSError:  # such as a full disk: the caller still has to answer its request
        logger.exception("the failure of %s cannot be reported", model)


class Notice:
    """A file that tells all processes something once, also on a full disk. path None: nobody is ever told."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def reserve(self) -> None:
        """Make the file under another name, so that `give` needs neither bytes nor an inode of the disk."""
        if self.path:
            self._reserved.write_text(" " * NOTICE_BYTES)

    def give(self, text: str = "") -> None:
        """Let `given` be true from now on. OSError if nothing was reserved and the disk is full."""
        if self.path:
            with self._reserved.open("r+b" if self._reserved.exists() else "wb") as reserved:
                reserved.write(text.encode()[:NOTICE_BYTES].ljust(NOTICE_BYTES))
            self._reserved.rename(self.path)

    def given(self) -> bool:
        return self.path is not None and self.path.exists()

    @property
    def _reserved(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix(".reserved")


def failure_of(directory: Path | None, model: str) -> Notice:
    """Return the notice that a model of the server with this metrics directory has failed, or that the server goes on
    without it; its text is the reason."""
    return Notice(directory and directory / f"{model}{FAILED}")


def reported_failures(directory: Path) -> dict[str, str]:
    """Return what `report_failure` has written: the reasons by model."""
    return {path.stem: path.read_text(errors="replace").strip() for path in directory.glob(f"*{FAILED}")}
