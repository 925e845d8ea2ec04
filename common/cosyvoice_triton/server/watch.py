"""Notices that a model has died, hangs or fails at its work. Triton notices none of this and stays ready.

Each of our models publishes a file four times a second (`monitoring/health.py`). A process that is stopped, or
whose interpreter is blocked, stops renewing it; a model whose engine is stuck renews it, but completes nothing.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from cosyvoice_triton.monitoring import metrics
from cosyvoice_triton.monitoring.health import FAILING, SUCCESS_AGE, failure_of, reported_failures
from cosyvoice_triton.monitoring.metrics import MetricsFile

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5  # between two checks; models publish twice in that time
# After the first, the server is not ready; after the second it has to be restarted, because neither heals by itself.
SILENT_SECONDS, HUNG_SECONDS = 3.0, 15.0  # without a renewed file; 15 s is also when calls of a model time out
IDLE_SECONDS, USELESS_SECONDS = 30.0, 60.0  # without an answered request or a passed test
# The second for a model that has not failed its test but does not come to it: a CPU renders a long utterance, as
# upstream's clients send it, for minutes, and is sound.
STUCK_SECONDS = 600.0


@dataclass
class _Instance:
    """What is known of a model instance. version: of its file. silent: seconds for which that has been the same."""

    model: str
    version: int
    success_age: float
    failing: bool
    silent: float = 0.0


class ModelWatch:
    """Checks the models' files. A model's silence is counted in checks, not by a clock, so that a pause of the whole
    machine, such as a suspended VM, is not taken for a hanging model."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._instances: dict[str, _Instance] = {}
        self.lost: dict[str, str] = {}  # the models without which the server goes on, and why, a line each

    def check(self) -> dict[str, str]:
        """Return the models that have to be restarted, apart from those that are lost, and why. It must be called every
        WATCH_SECONDS."""
        for path in self._directory.glob(f"*{metrics.ENDING}"):
            self._read(path)
        faults = {}
        for instance in self._instances.values():
            model = instance.model
            if instance.silent >= HUNG_SECONDS:
                faults[model] = f"the process of model {model} hangs: no sign of life for {instance.silent:.0f} s"
            elif instance.success_age >= (USELESS_SECONDS if instance.failing else STUCK_SECONDS):
                faults[model] = f"model {model} has completed no request and no test for {instance.success_age:.0f} s"
        for model, reason in reported_failures(self._directory).items():
            if model not in self.lost:
                faults[model] = f"model {model} has failed and cannot recover: {reason}"
        return faults

    @property
    def models(self) -> set[str]:
        """Return the models that publish their files."""
        return {instance.model for instance in self._instances.values()}

    def lose(self, model: str, reason: str) -> None:
        """Let the server go on without a model, whose processes have ended. Others ask `failure_of`."""
        self.lost[model] = reason
        try:
            failure_of(self._directory, model).give(reason)
        except OSError as error:
            logger.warning("others cannot be told that %s is lost: %s", model, error)
        for name in [name for name, instance in self._instances.items() if instance.model == model]:
            del self._instances[name]
            labels = {"model": model, "model_instance": Path(name).stem}
            # In place of its last numbers.
            MetricsFile(self._directory / name, metrics.samples_of(labels, {FAILING: 1})).close()

    def why_not_ready(self) -> str:
        """Return why the server is not ready although it says so, in a few words for each model concerned; empty if it
        is."""
        found = []
        for instance in self._instances.values():
            if instance.silent >= SILENT_SECONDS:
                found.append(f"{instance.model} hangs")
            elif instance.failing:
                found.append(f"{instance.model} fails its own test")
            elif instance.success_age >= IDLE_SECONDS:
                found.append(f"{instance.model} completes nothing")
        return ", ".join(found)

    def _read(self, path: Path) -> None:
        known, (version, samples) = self._instances.get(path.name), metrics.read(path)
        if known is not None and known.version == version:
            known.silent += WATCH_SECONDS
            return
        values = {name: (value, labels["model"]) for name, *_, labels, value in samples}
        if SUCCESS_AGE.name in values:
            success_age, model = values[SUCCESS_AGE.name]
            self._instances[path.name] = _Instance(model, version, success_age, bool(values[FAILING.name][0]))
