"""Recordings of two voices and ten sentences to speak in them: the default data of the tools.

README.md has their sources and licences.

manifest.jsonl has one request a line, in the columns of upstream's data sets (`cosyvoice_triton.load.samples`).
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MANIFEST = FOLDER / "manifest.jsonl"
