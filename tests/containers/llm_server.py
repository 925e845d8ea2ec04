#!/usr/bin/env python3
"""In the image of vllm.Dockerfile, as `vllm`: an LLM server that needs no GPU.

It reads the arguments of the real one, checks that what they name exists, and answers every completion with the same
speech tokens. Python's own library only.
"""

import argparse
import importlib.util
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKENS = 60  # 2.4 s of audio
PAUSE = 0.01


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("model", type=Path)
    for name in ("served-model-name", "logits-processors", "host"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "max-num-seqs", "tensor-parallel-size", "pipeline-parallel-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--compilation-config", type=json.loads)
    return parser.parse_args()


def check(options: argparse.Namespace) -> None:
    """SystemExit if the model or the logits processor is missing."""
    package, _, file = options.logits_processors.partition(":")[0].rpartition(".")
    spec = importlib.util.find_spec(package)  # not the module itself, which imports vLLM
    folder = (spec and spec.submodule_search_locations or [""])[0]
    needed = [options.model / "config.json", Path(folder) / f"{file}.py"]
    if absent := [str(path) for path in needed if not path.is_file()]:
        sys.exit(f"missing: {' '.join(absent)}")


class Handler(BaseHTTPRequestHandler):
    model = ""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or asked["model"] != self.model:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for token in range(TOKENS):
            self.event(f"<|s_{token * 97 % 6561}|>", None)
            time.sleep(PAUSE)
        self.event("<|eos1|>", "stop")

    def event(self, text: str, finish_reason: str | None) -> None:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason}
        self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())


if __name__ == "__main__":
    options = parse()
    check(options)
    Handler.model = options.served_model_name
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
