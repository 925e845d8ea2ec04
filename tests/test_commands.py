"""Commands of a caller's machine start without the libraries of the models."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "scipy", "transformers"}


@pytest.mark.parametrize("module", ["say", "wait_ready", "voice", "client_grpc", "client_http", "load.benchmark", ""])
def test_commands_that_only_ask_a_server_do_not_import_the_libraries_of_the_models(module: str) -> None:
    name = f"cosyvoice_triton.{module}" if "." in module else f"cosyvoice_triton.cli.{module}".rstrip(".")
    code = f"import sys, {name}; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert name in imported and not HEAVY & set(imported)
