"""First audio of a text that arrives token by token, in both modes of the speech service's WebSocket.

    python -m tools.bench.text_feed --voice slt        20 tokens a second to the service at localhost:10086

Prints for each mode the medians of all repetitions: milliseconds from the first token of text to the first audio, how
many tokens had been sent by then, and seconds of silence in a player. The modes take turns.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from common import stacks
from common.constants import SAMPLE_RATE
from common.llm.speech_tokens import LLMTokenizer
from common.playback import Playback
from tools.arguments import positive_int

MODES = "sentences", "tokens"
TEXT = (
    "Thank you for waiting, I have looked at your order now and found the reason for the delay. The parcel left our "
    "warehouse on Tuesday. It should be with you tomorrow before noon."
)


@dataclass
class Feed:
    """One utterance. first: seconds to the first audio, None so far. fed: tokens sent by then. gaps: seconds."""

    first: float | None = None
    fed: int = 0
    gaps: float = 0.0
    seconds: float = 0.0  # of audio


async def speak(url: str, mode: str, voice: str, tokens: list[str], rate: float) -> Feed:
    """One utterance, whose tokens are sent `rate` a second. RuntimeError for an error of the service."""
    feed, playback, sent = Feed(), Playback(), 0
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/audio/speech/stream") as socket:

        async def send(kind: str, **fields: Any) -> None:
            await socket.send_str(json.dumps({"type": kind, **fields}))

        async def write() -> None:
            nonlocal sent
            for index, token in enumerate(tokens):
                await asyncio.sleep(started + index / rate - time.monotonic())
                sent = index + 1
                await send("input.text", text=token)
            await send("input.done")

        await send("session.config", voice=voice, mode=mode)
        started = time.monotonic()
        writer = asyncio.create_task(write())
        try:
            async for message in socket:
                now = time.monotonic()
                if message.type == aiohttp.WSMsgType.BINARY:
                    if feed.first is None:
                        feed.first, feed.fed = now - started, sent
                    seconds = len(message.data) / 2 / SAMPLE_RATE
                    feed.gaps += playback.add(seconds, now)
                    feed.seconds += seconds
                elif (event := json.loads(message.data))["type"] == "error":
                    raise RuntimeError(event["error"]["message"])
                elif event["type"] == "session.done":
                    break
        finally:
            writer.cancel()
    return feed


async def measure(args: argparse.Namespace) -> None:
    tokenizer = LLMTokenizer.from_dir(args.tokenizer)
    encoded = tokenizer.tokenizer.encode(args.text, add_special_tokens=False)
    tokens = [args.text[begin:end] for begin, end in encoded.offsets]
    print(f"{len(tokens)} tokens at {args.rate:g} a second, {args.repeat} times in each mode")
    feeds: dict[str, list[Feed]] = {mode: [] for mode in MODES}
    for _ in range(args.repeat + 1):  # the first one warms the voice's cache up
        for mode in MODES:
            feeds[mode].append(await speak(args.url, mode, args.voice, tokens, args.rate))
    for mode, results in feeds.items():
        firsts = [1e3 * feed.first for feed in results[1:] if feed.first is not None]
        assert len(firsts) == args.repeat, f"{mode}: utterances without audio"
        fed, gaps, seconds = (
            statistics.median(getattr(feed, name) for feed in results[1:]) for name in ("fed", "gaps", "seconds")
        )
        print(
            f"{mode:10} first audio after {statistics.median(firsts):6.0f} ms ({min(firsts):.0f} to {max(firsts):.0f}),"
            f" {fed:.0f} tokens; silence {gaps:.2f} s in {seconds:.1f} s of speech"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="ws://localhost:10086")
    parser.add_argument("--voice", default="slt")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("models/demo", stacks.DEFAULT.llm.directory), help="whose tokens are fed"
    )
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second")
    parser.add_argument("--repeat", type=positive_int, default=10)
    asyncio.run(measure(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
