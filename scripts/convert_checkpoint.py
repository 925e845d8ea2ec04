"""Upstream's name of `cosyvoice-triton prepare convert-checkpoint`."""

from cosyvoice_triton.cli.convert_checkpoint import main

raise SystemExit(main())
