"""Upstream's name of `cosyvoice-triton offline`."""

from cosyvoice_triton.cli.offline_inference import main

raise SystemExit(main())
