# A stand-in for vLLM's image, which needs a GPU: the same command, but a server that answers with fixed speech tokens.
FROM python:3.11.13-slim-bookworm
COPY llm_server.py /usr/local/bin/vllm
RUN chmod 755 /usr/local/bin/vllm
