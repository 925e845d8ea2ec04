"""Parts of scripts/prepare.py: checkpoints fetched and verified, the LLM's engine built."""
