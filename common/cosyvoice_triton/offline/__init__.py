"""Speech without a server, over the pipeline and the engines of `speaker`.

shared       what upstream's programs share (cli/offline_inference.py, cli/token2wav.py, which `streaming` runs in
             chunks): options and samples, what both load, a run with its stages and failures
inspection   what a downloaded checkpoint is worth, for `doctor`
"""
