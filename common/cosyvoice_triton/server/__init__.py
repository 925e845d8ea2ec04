"""Runs one tritonserver: the process that starts it, supervises it and stops it. The models never import this room.

rendering.py      templates of config.pbtxt -> a model repository
installation.py   finds the tritonserver to run, and compiles what it is started with
gpus.py           the GPUs that are there, and what one of them serves
mps.py            CUDA's MPS for the models of one server
tritonserver.py   a tritonserver as a context manager
logs.py           the server's log file, rotated
watch.py          notices models that die, hang or fail
serving.py        all of it as the main process of a container: the health page, draining before a stop
readiness.py      waits for pages to be ready, from outside
"""
