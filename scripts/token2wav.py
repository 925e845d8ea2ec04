"""Upstream's name of `cosyvoice-triton token2wav`."""

from cosyvoice_triton.cli.token2wav import main

raise SystemExit(main())
