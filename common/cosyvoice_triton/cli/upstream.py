"""Options of upstream's programs that have no meaning here. They are accepted, so that upstream's commands run as they
stand; each prints one line that says why it changes nothing."""

import argparse
import sys
from typing import Any

_ONE_PROCESS = "the recordings are read by the program itself, before anything is measured"
_NO_EXPERTS = "CosyVoice2's LLM has no experts"

WITHOUT_MEANING = {  # the reason of each option, by program
    "convert_checkpoint": {
        "--per_group": "int4_gptq always has a scale for each --group_size weights, others never",
        "--moe_tp_size": _NO_EXPERTS,
        "--moe_ep_size": _NO_EXPERTS,
    },
    "client_grpc": {
        "--compute-wer": "`cosyvoice-triton evaluate --audio` counts word errors",
        "--chunk-overlap-duration": "the server sends chunks that are already cross-faded",
        "--log-interval": "the percentiles are shown after every answer",
    },
    "offline_inference": {"--num-workers": _ONE_PROCESS, "--prefetch": _ONE_PROCESS},
}


def accept_upstream_options(parser: argparse.ArgumentParser, program: str) -> None:
    """Add those of one of upstream's programs to its parser, with or without a number after them."""
    group = parser.add_argument_group("without a meaning here", "upstream's; accepted")
    for name, reason in WITHOUT_MEANING[program].items():
        stored: Any = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}  # nowhere
        group.add_argument(name, action=_Explained, nargs="?", const=program, metavar="N", help=reason, **stored)


class _Explained(argparse.Action):
    """Print the option's reason and store nothing."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        print(f"{self.const}: {option} changes nothing here: {self.help}", file=sys.stderr)
