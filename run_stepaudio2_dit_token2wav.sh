#!/usr/bin/env bash
# The stages, where upstream's documents call them. Not a link: some ways to copy a repository turn links into text files.
exec bash "$(dirname "${BASH_SOURCE[0]}")/scripts/run_stepaudio2_dit_token2wav.sh" "$@"
