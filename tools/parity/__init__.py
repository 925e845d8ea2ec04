"""Golden fixtures against our networks: what a fixture holds (fixture), who checks it (the modules), running (runner).

Each of the modules hift, features, flow_unet, flow_dit and streaming offers

    CHECKS: dict[str, Check]      fixture name (the JSON's "name") -> its check

A check computes a fixture's results and yields (key of the stored tensor, computed tensor).
"""

from tools.parity.fixture import Check, Fixture

__all__ = ["Check", "Fixture"]
