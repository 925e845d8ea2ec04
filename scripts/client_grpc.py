"""Upstream's name of `cosyvoice-triton client-grpc`."""

from cosyvoice_triton.cli.client_grpc import main

raise SystemExit(main())
