"""Python clients of the speech models, for launchers, tools and tests.

requests.py      the request, the recorded answer, error messages, and the options that all clients share
grpc_client.py   streamed and offline requests over gRPC
http_client.py   offline requests over HTTP
"""
