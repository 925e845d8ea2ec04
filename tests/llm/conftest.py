"""The LLM's fixtures, which other folders use too."""

from tests.support.llm_fixtures import genai_dir, install, llm_dir, tokenizer  # noqa: F401
