"""Upstream's name of `cosyvoice-triton test-llm`."""

from cosyvoice_triton.cli.test_llm import main

raise SystemExit(main())
