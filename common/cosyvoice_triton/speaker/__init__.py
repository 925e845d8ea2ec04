"""A stack in this process: the pipeline that the orchestrator has over Triton, without a server.

speaker.py    Speaker, for Python programs
engines.py    the stack's engines, loaded once, and their ports to the pipeline
"""
