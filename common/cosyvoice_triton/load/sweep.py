"""Several runs that differ in one number, as JSON, tables and a plot."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cosyvoice_triton.load.measure import Run
from cosyvoice_triton.load.plan import Load
from cosyvoice_triton.load.plot import plot_sweep
from cosyvoice_triton.load.report import disaggregated_table, markdown_tables


@dataclass
class Sweep:
    """Results and conditions of a sweep. rows: the figures of each run, with the swept number as `label`."""

    title: str
    command: str
    made: str
    client_machine: str
    label: str
    token2wav_gpus: int = 1
    llm_gpus: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, load: Load, run: Run) -> None:
        row = {"label": load.tasks if load.rate is None else load.rate, **load.settings(), **run.figures()}
        row["failures"] = sorted({outcome.error for outcome in run.failed})
        if load.rate is None:
            row["concurrent_task_per_instance"] = load.tasks // len(load.servers)
            row["concurrent_tasks_per_gpu"] = load.tasks / (self.token2wav_gpus + self.llm_gpus)
        self.rows.append(row)

    def write(self, output: Path) -> None:
        """Write OUTPUT.md, .json and .png."""
        output.parent.mkdir(parents=True, exist_ok=True)
        with_suffix(output, ".json").write_text(
            json.dumps(asdict(self), indent=1, ensure_ascii=False), encoding="utf-8"
        )
        with_suffix(output, ".md").write_text(self.markdown(), encoding="utf-8")
        plot_sweep(self.rows, self.label.lower(), self.title, with_suffix(output, ".png"))

    def markdown(self) -> str:
        settings = self.rows[0]
        head = [
            f"{self.title or 'Benchmark'}: {settings['model']}, {settings['mode']}, {len(settings['servers'])} "
            f"server(s). Made {self.made}, the client on {self.client_machine}.",
            f"\n`{self.command}`\n",
            f"The warm-up ({settings['warmup_requests']} requests for the first row) is not counted. A gap is an "
            f"underrun of a player that starts {settings['player_buffer_ms']:.0f} ms after the first chunk.\n",
        ]
        parts = [*head, markdown_tables(self.rows, self.label)]
        if "concurrent_tasks_per_gpu" in settings and (self.llm_gpus or len(settings["servers"]) > 1):
            parts += [
                "#### Disaggregated Server, First Chunk Latency\n",
                disaggregated_table(self.rows, self.token2wav_gpus),
            ]
        failures = sorted({error for row in self.rows for error in row["failures"]})
        if failures:
            parts += ["\nErrors:\n", *(f"- {error}" for error in failures)]
        return "\n".join(parts).rstrip() + "\n"


def with_suffix(output: Path, suffix: str) -> Path:
    """Return `output` with a suffix appended; a name such as run-0.5 keeps its dot."""
    return output.with_name(output.name + suffix)
