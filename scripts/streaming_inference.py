"""Upstream's name of `cosyvoice-triton streaming`."""

from cosyvoice_triton.cli.streaming_inference import main

raise SystemExit(main())
