"""Upstream's three programs without a server, over the pipeline and the engines of `speaker`.

shared                    options and samples, what both programs load, times of stages, failures
inference, token2wav      the programs; `streaming` is token2wav in chunks
inspection                what a downloaded checkpoint is worth, for `doctor`
"""
