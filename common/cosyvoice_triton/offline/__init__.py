"""Upstream's three programs without a server.

inputs       options, samples and voice prompts
llm          the LLM, in this process or behind a server
rendering    speech tokens to audio, whole or streamed
pipeline, stages          samples through all stages, and their times
results      the output folder
tool         exit codes and failures
inference, token2wav      the programs; `streaming` is token2wav in chunks
"""
