"""Fixtures of the offline tools and of their LLM."""

from tests.support.llm_fixtures import genai_dir, install, llm_dir, tokenizer  # noqa: F401
from tests.support.offline_fixtures import manifest, one_thread  # noqa: F401
