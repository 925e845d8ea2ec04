"""Golden fixtures of upstream's results, compared with our networks.

`fixture` reads a fixture and `runner` runs its check. Each of the modules hift, features, flow_unet, flow_dit,
streaming, cosyvoice3 and llm has

    CHECKS: dict[str, Check]      fixture name (the JSON's "name") -> its check

A check computes a fixture's results and yields (key of the stored tensor, computed tensor). `served` runs flows as
token2wav does, on a CPU or a GPU; `reference` has upstream's algorithms where serving differs from them.
"""

from tests.parity.fixture import Check, Fixture

__all__ = ["Check", "Fixture"]
