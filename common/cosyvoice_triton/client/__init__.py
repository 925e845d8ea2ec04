"""Python clients of the speech models, for launchers, tools and tests.

utterance.py     a request, and a text while it is being written
answer.py        the parts of an answer and their times
failures.py      what a client reports; arguments.py: the options that all clients share
grpc_client.py   streamed and offline requests over gRPC
"""
