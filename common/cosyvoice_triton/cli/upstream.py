"""Options of upstream's programs that have no meaning here. They are accepted, so that upstream's commands run as they
stand; each prints one line that says why it changes nothing."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Option(NamedTuple):
    """kind: of its value; None for an option without one."""

    name: str
    kind: Callable[[str], Any] | None
    reason: str


_ONE_PROCESS = "the recordings are read by the program itself, before anything is measured"
_NO_EXPERTS = "CosyVoice2's LLM has no experts"

WITHOUT_MEANING: dict[str, tuple[Option, ...]] = {
    "convert_checkpoint": (
        Option("--per_group", None, "int4_gptq always has a scale for each --group_size weights, others never"),
        Option("--moe_tp_size", int, _NO_EXPERTS),
        Option("--moe_ep_size", int, _NO_EXPERTS),
    ),
    "client_grpc": (
        Option("--compute-wer", None, "`cosyvoice-triton evaluate --audio` counts word errors"),
        Option("--chunk-overlap-duration", float, "the server sends chunks that are already cross-faded"),
    ),
    "offline_inference": (
        Option("--num-workers", int, _ONE_PROCESS),
        Option("--prefetch", int, _ONE_PROCESS),
    ),
}


def accept_upstream_options(parser: argparse.ArgumentParser, program: str) -> None:
    """Add those of a program of upstream."""
    group = parser.add_argument_group("without a meaning here", "upstream's; accepted")
    for option in WITHOUT_MEANING[program]:
        switch = {"nargs": 0} if option.kind is None else {"type": option.kind}
        group.add_argument(
            option.name,
            action=_Explained,
            program=program,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            metavar=None if option.kind is None else "N",
            help=option.reason,
            **switch,
        )


class _Explained(argparse.Action):
    """Prints the option's reason and stores nothing."""

    def __init__(self, *arguments: Any, program: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._program = program

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        print(f"{self._program}: {option} changes nothing here: {self.help}", file=sys.stderr)
