"""CPU time per token of the OpenAI-compatible client, against a local server in another process.

    python -m tools.bench.llm_client                        tokens arrive as fast as the server can send them
    python -m tools.bench.llm_client --tokens-per-second 25 each stream gets one token at a time, as from an LLM

The server sends events like those of `vllm serve` with token ids, one write per token. The measured CPU time is that of
this process from the first request to the last token: HTTP, event parsing, and passing the tokens on.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from common import stacks
from common.llm.interface import LengthRatios, LLMPrompt, Sampling, Timeouts
from common.llm.openai_client import OpenAILM
from common.llm.speech_tokens import LLMTokenizer
from tools.demo_model.llm import build_tokenizer

TARGET_MICROSECONDS = 50
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(first_speech_id: int, token: int, finish_reason: str | None) -> bytes:
    """One HTTP chunk with one event."""
    choice = {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": [first_speech_id + token],
        "prompt_token_ids": None,
    }
    event = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": stacks.DEFAULT.llm.directory,
        "choices": [choice],
        "usage": None,
    }
    data = f"data: {json.dumps(event)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def _serve(first_speech_id: int, tokens: int, rate: float, port: Connection) -> None:
    """The server process: sends its port, then answers until it is terminated."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l"))
        await reader.readexactly(length)
        writer.write(HEAD)
        begun = time.monotonic()
        for token in range(tokens):
            if rate:
                await asyncio.sleep(begun + token / rate - time.monotonic())
            writer.write(_event(first_speech_id, token, "length" if token == tokens - 1 else None))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def _measure(url: str, tokenizer: LLMTokenizer, streams: int, tokens: int) -> tuple[float, float]:
    """(seconds, CPU seconds of this process) for `streams` concurrent streams of `tokens` each."""
    llm = OpenAILM([url], "model", tokenizer, Timeouts(first_token=60, token=60), LengthRatios(min=0, max=1e6), "vllm")

    async def generate() -> int:
        stream = llm.generate(LLMPrompt("Hello.", "A reference.", range(100)), Sampling(max_tokens=tokens))
        return sum([len(group) async for group in stream])

    await asyncio.gather(*(generate() for _ in range(2)))  # warm-up: imports and caches
    begun, cpu = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*(generate() for _ in range(streams)))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    if set(counts) != {tokens}:
        raise RuntimeError(f"streams of {tokens} tokens arrived as {sorted(set(counts))}")
    await llm.aclose()
    return seconds, cpu


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=750, help="per stream")
    parser.add_argument("--tokens-per-second", type=float, default=0.0, help="per stream; 0: as fast as possible")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        build_tokenizer().save(str(Path(directory) / "tokenizer.json"))
        tokenizer = LLMTokenizer.from_dir(directory)
    ours, theirs = multiprocessing.Pipe()
    arguments = (tokenizer.first_speech_id, args.tokens, args.tokens_per_second, theirs)
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        seconds, cpu = asyncio.run(_measure(url, tokenizer, args.streams, args.tokens))
    finally:
        server.terminate()
        server.join()
    total = args.streams * args.tokens
    microseconds = cpu / total * 1e6
    print(f"{args.streams} streams of {args.tokens} tokens: {total / seconds:,.0f} tokens/s")
    print(f"client: {microseconds:.1f} microseconds of CPU per token (limit: {TARGET_MICROSECONDS})")
    return 0 if microseconds <= TARGET_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
