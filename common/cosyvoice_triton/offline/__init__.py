"""Upstream's three programs without a server, over the pipeline and the engines of `speaker`.

inputs       options, samples and speech tokens
engines      what the options load
results      the output folder
tool         the process, times of stages, failures
inference, token2wav      the programs; `streaming` is token2wav in chunks
"""
