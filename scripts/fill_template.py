"""Upstream's name of `cosyvoice-triton fill-template`."""

from cosyvoice_triton.cli.fill_template import main

raise SystemExit(main())
