"""Upstream's name of `cosyvoice-triton client-http`."""

from cosyvoice_triton.cli.client_http import main

raise SystemExit(main())
