"""The OpenAI-compatible client against a real `transformers serve`, and against a faulty server."""

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling, Timeouts
from cosyvoice_triton.llm.openai_client import OpenAILM
from cosyvoice_triton.llm.openai_dialects import DIALECTS, CompletionRequest, EventReader
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer, speech_token_text
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.stacks import TokenizerRules

from tests.support.llm_fixtures import llm_dir  # noqa: F401
from tests.support.raw_http_server import STREAM, RawHttpServer, event, ids_event, reply

QUICK = Timeouts(connect=0.5, first_token=0.6, token=0.6)
PROMPT = LLMPrompt("Hello there.", "A reference.", (1, 2, 3))


@pytest.fixture(scope="module")
def tokenizer(llm_dir):  # noqa: F811
    return LLMTokenizer.from_dir(llm_dir)


async def speak(llm, prompt=PROMPT, **sampling):
    """All tokens of one utterance, and the finish reason."""
    stream = llm.generate(prompt, Sampling(**sampling))
    try:
        tokens = [token async for tokens in stream for token in tokens]
    finally:
        await stream.aclose()
    return tokens, stream.finish_reason


# --- a real server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers_url(llm_dir, tmp_path_factory):  # noqa: F811
    port = free_port()
    executable = Path(sys.executable).with_name("transformers")
    command = [executable, "serve", llm_dir, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path_factory.mktemp("transformers") / "log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while fault(f"{url}/health"):
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def run_against(url, tokenizer, model, scenario):
    async def run():
        llm = OpenAILM([url], model, tokenizer)
        try:
            return await scenario(llm)
        finally:
            await llm.aclose()

    return asyncio.run(run())


@pytest.mark.slow
def test_transformers_serve_generates_speech_and_repeats_a_seed(transformers_url, tokenizer, llm_dir):  # noqa: F811
    async def scenario(llm):
        return [await speak(llm, seed=seed) for seed in (1, 1, 2)]

    first, again, other = run_against(transformers_url, tokenizer, str(llm_dir), scenario)
    assert len(first[0]) > 10
    assert first[1] == "stop"
    assert first == again
    assert first != other


@pytest.mark.slow
def test_transformers_serve_reports_the_cut_by_max_tokens(transformers_url, tokenizer, llm_dir):  # noqa: F811
    async def scenario(llm):
        return await speak(llm, seed=1, max_tokens=7)

    tokens, reason = run_against(transformers_url, tokenizer, str(llm_dir), scenario)
    assert (len(tokens), reason) == (7, "length")


@pytest.mark.slow
def test_transformers_serve_uses_the_requested_sampling(transformers_url, tokenizer, llm_dir):  # noqa: F811
    async def scenario(llm):
        return [await speak(llm, seed=seed, temperature=0.0, max_tokens=40) for seed in (1, 2)]

    first, other = run_against(transformers_url, tokenizer, str(llm_dir), scenario)
    assert first == other


# --- a faulty server -------------------------------------------------------------------------------------


def ask(tokenizer, *answers, dialect="auto", **sampling):
    """One utterance from a server that gives these answers; returns the result and the server."""

    async def run():
        server = RawHttpServer(*answers)
        async with server.running() as url:
            llm = OpenAILM([url], "model", tokenizer, QUICK, dialect=dialect)
            try:
                return await asyncio.wait_for(speak(llm, **sampling), 5), server
            finally:
                await llm.aclose()

    return asyncio.run(run())


GOOD = (STREAM, event("<|s_1|><|s_"), event("2|>"), event("", "stop"), b"data: [DONE]\n\n")


def test_tokens_are_read_across_events(tokenizer):
    result, _ = ask(tokenizer, GOOD)
    assert result == ([1, 2], "stop")


def test_an_end_token_in_the_text_ends_the_answer(tokenizer):
    result, _ = ask(tokenizer, (STREAM, event("<|s_1|><|eos1|><|s_2|>"), 30.0))
    assert result == ([1], "stop")


def test_the_request_has_template_and_sampling(tokenizer):
    _, server = ask(tokenizer, GOOD, seed=7, temperature=0.5, top_k=9, max_tokens=99)
    (body,) = server.bodies
    assert body["prompt"] == tokenizer.encode_prompt(PROMPT).tolist()
    expected = {"model": "model", "stream": True, "seed": 7, "temperature": 0.5, "top_k": 9, "max_tokens": 99}
    assert expected.items() <= body.items()
    assert body["stop_token_ids"] == list(tokenizer.end_ids)


def test_the_length_of_the_text_limits_the_length_of_the_speech(tokenizer):
    _, server = ask(tokenizer, GOOD)
    (body,) = server.bodies
    text_tokens = tokenizer.text_length(PROMPT.target_text)
    assert (body["min_tokens"], body["max_tokens"]) == (2 * text_tokens, 20 * text_tokens)
    _, server = ask(tokenizer, GOOD, prompt=dataclasses.replace(PROMPT, generated=(1, 2, 3)))
    (body,) = server.bodies
    assert (body["min_tokens"], body["max_tokens"]) == (2 * text_tokens - 3, 20 * text_tokens - 3)
    assert body["prompt"][-3:] == tokenizer.to_llm_ids([1, 2, 3]).tolist()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((reply("500 Internal Server Error", b"out of memory"),), "HTTP 500: out of memory"),
        ((reply("503 Service Unavailable", b""),), "HTTP 503"),
        ((reply("404 Not Found", b"no model named model"),), "HTTP 404: no model named model"),
        ((b"this is no HTTP\r\n\r\n",), "LLM server http://127"),
        ((STREAM, b"data: garbage\n\n"), "an invalid event: b'garbage'"),
        ((STREAM, b"data: [1]\n\n"), "an invalid event"),
        ((STREAM, b'data: {"choices": [{"text": 5}]}\n\n'), "an invalid event"),
        ((STREAM, b'data: {"error": {"message": "worker died"}}\n\n'), "worker died"),
        ((STREAM, event("<|s_1|>", "abort")), "ended the answer with 'abort'"),
        ((STREAM, event("<|s_1|>"), event("<|s_2|>")), "ended in the middle of an answer"),
        ((STREAM, event("<|s_1|>"), b"data: [DONE]\n\n"), "ended in the middle of an answer"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", event("<|s_1|>")), "LLM server http://127"),
        ((30.0,), "sent no token for 0.6 s"),
        ((STREAM, 30.0), "sent no token for 0.6 s"),
        ((STREAM, event("<|s_1|>"), 30.0), "sent no token for 0.6 s"),
        ((STREAM, *[b": ping\n\n", 0.2] * 20), "sent no token for 0.6 s"),
        ((STREAM, event("<|s_1|>"), *[b": ping\n\n", 0.2] * 20), "sent no token for 0.6 s"),
        ((STREAM, event("<|s_1|>"), *[event("word"), 0.2] * 20), "sent no token for 0.6 s"),
        ((STREAM, b"data: " + b"x" * 2_000_000), "an invalid event: b'data: xxx"),
        ((b"HTTP/1.1 500 Oops\r\nContent-Length: 999\r\n\r\n", 30.0), "sent no token for 0.6 s"),
        ((STREAM, event("<|s_1|>" * 751)), "ignores max_tokens 240"),
    ],
)
def test_a_faulty_server_is_an_error_in_time(tokenizer, answer, message):
    with pytest.raises(UnavailableError, match=message):
        ask(tokenizer, answer)


@pytest.mark.serial
def test_a_ping_does_not_delay_the_error(tokenizer):
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="sent no token for 0.6 s"):
        ask(tokenizer, (STREAM, event("<|s_1|>"), 0.5, b": ping\n\n", 30.0))
    assert time.monotonic() - started < 1


@pytest.mark.serial
def test_servers_that_accept_no_connection_share_one_deadline(tokenizer):
    with socket.socket() as full, socket.socket() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting.connect(full.getsockname())  # the backlog is full: further connections get no answer
        url = f"http://127.0.0.1:{full.getsockname()[1]}"

        async def run():
            llm = OpenAILM([url] * 4, "model", tokenizer, Timeouts(connect=0.3, first_token=0.6, token=0.6))
            try:
                await speak(llm)
            finally:
                await llm.aclose()

        started = time.monotonic()
        with pytest.raises(UnavailableError, match=url):
            asyncio.run(run())
        assert 0.55 < time.monotonic() - started < 1.1


def test_a_refused_connection_is_an_error_with_the_url(tokenizer):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"LLM server {url} cannot be reached"):
            run_against(url, tokenizer, "model", speak)


def test_a_rejected_request_is_a_value_error_with_the_servers_message(tokenizer):
    with pytest.raises(ValueError, match="HTTP 400: prompt too long"):
        ask(tokenizer, (reply("400 Bad Request", b"prompt too long"),))


def test_the_dialect_is_learned_once(tokenizer):
    async def run():
        rejection = (reply("422 Unprocessable", b"Unexpected fields: top_k"),)
        server = RawHttpServer(rejection, rejection, rejection, GOOD)
        async with server.running() as url:
            llm = OpenAILM([url], "model", tokenizer, QUICK)
            results = [await speak(llm, top_k=9), await speak(llm, top_k=9)]
            await llm.aclose()
            return results, server.bodies

    results, bodies = asyncio.run(run())
    assert results == [([1, 2], "stop")] * 2
    kinds = [(type(body["prompt"]), "top_k" in body, "generation_config" in body) for body in bodies]
    assert kinds == [(list, True, False)] * 2 + [(str, True, False)] + [(str, False, True)] * 2
    config = json.loads(bodies[-1]["generation_config"])
    assert (config["top_k"], config["eos_token_id"]) == (9, list(tokenizer.end_ids))


def test_tokens_are_read_as_ids_if_the_server_sends_ids(tokenizer):
    o, end = tokenizer.first_speech_id, tokenizer.end_ids[0]
    stray = tokenizer.sos_id
    result, _ = ask(tokenizer, (STREAM, ids_event([o + 5, stray]), ids_event([o + 6, end], "stop")))
    assert result == ([5, 6], "stop")


def test_events_may_arrive_in_pieces_of_any_size(tokenizer):
    answer = event("<|s_1|>") + b": ping\r\n\r\n" + event("<|s_22|>") + event("", "stop") + b"data: [DONE]\n\n"
    pieces = [answer[i : i + 7] for i in range(0, len(answer), 7)]
    result, _ = ask(tokenizer, (STREAM, *[part for piece in pieces for part in (piece, 0.001)]))
    assert result == ([1, 22], "stop")


def test_a_chat_server_gets_the_template_as_messages(tokenizer):
    delta = {"choices": [{"index": 0, "delta": {"content": "<|s_4|>"}, "finish_reason": None}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    events = [b"data: " + json.dumps(content).encode() + b"\n\n" for content in (delta, last)]
    continued = dataclasses.replace(PROMPT, generated=(9,))
    result, server = ask(tokenizer, (STREAM, *events), prompt=continued, dialect="chat")
    assert result == ([4], "length")
    assert server.bodies[0]["messages"] == [
        {"role": "user", "content": "A reference.Hello there."},
        {"role": "assistant", "content": speech_token_text([1, 2, 3, 9])},
    ]


@pytest.mark.parametrize(
    ("prompt", "content"),
    [
        (LLMPrompt("|>Hello<|eos1|>", "A <|s_1"), "A <|s_1 |>Hello "),
        (LLMPrompt("Hello<|eos1|>", instruction="sadly<|s_1|>"), "sadly <|endofprompt|>Hello "),
    ],
)
def test_the_token_that_ends_an_instruction_is_the_only_control_token_in_a_chat(tokenizer, prompt, content):
    async def run():
        server = RawHttpServer((STREAM, event("<|s_1|>", "stop")))
        async with server.running() as url:
            llm = OpenAILM([url], "model", tokenizer, QUICK, dialect="chat")
            stream = llm.generate(prompt, Sampling())
            await anext(stream)
            await stream.aclose()
            await llm.aclose()
        return server.bodies[0]["messages"]

    assert asyncio.run(run()) == [{"role": "user", "content": content}]


def test_the_control_tokens_of_a_chat_are_those_of_the_tokenizers_rules(tokenizer):
    rules = TokenizerRules(ends=("<|done|>",), end_of_prompt="<|go|>")
    own = dataclasses.replace(tokenizer, rules=rules)
    prompt = LLMPrompt("Hello", instruction="sadly")
    body = DIALECTS["chat"].request_body("model", CompletionRequest(prompt, Sampling(), own))
    assert body["messages"] == [{"role": "user", "content": "sadly<|go|>Hello"}]
    reader = EventReader(own, "http://server")
    assert reader.feed(event("<|s_5|><|done|><|s_6|>", None)) == ([5], "stop")


def test_the_chat_api_is_used_if_a_server_has_no_completions(tokenizer):
    absent = (reply("404 Not Found", b"no such path"),)
    answer = (STREAM, b'data: {"choices": [{"delta": {"content": "<|s_4|>"}, "finish_reason": "stop"}]}\n\n')
    result, server = ask(tokenizer, absent, absent, absent, absent, answer)
    assert result == ([4], "stop")
    assert "messages" in server.bodies[-1]


def test_repetition_aware_sampling_is_sent_to_vllm_only(tokenizer):
    _, server = ask(tokenizer, GOOD, dialect="vllm", ras_window=10)
    assert server.bodies[0]["vllm_xargs"] == {"ras_window": 10, "ras_tau": 0.1}
    with pytest.raises(ValueError, match="ras_window 10: only `vllm serve`"):
        ask(tokenizer, GOOD, dialect="trtllm", ras_window=10)


@pytest.mark.parametrize(
    "failure",
    [
        (reply("503 Service Unavailable", b"loading"),),
        (STREAM,),
        (STREAM, event("")),
    ],
)
def test_another_server_is_tried_if_no_token_has_arrived(tokenizer, failure):
    async def run():
        servers = RawHttpServer(failure), RawHttpServer(GOOD)
        async with servers[0].running() as first, servers[1].running() as second:
            llm = OpenAILM([first, second], "model", tokenizer, QUICK)
            results = [await speak(llm) for _ in range(3)]
            await llm.aclose()
        return results, [len(server.bodies) for server in servers]

    # The one that failed is not tried again while there is another.
    assert asyncio.run(run()) == ([([1, 2], "stop")] * 3, [1, 3])


def test_a_pooled_connection_that_the_server_closed_is_not_an_error(tokenizer):
    result, server = ask(tokenizer, (b"",), GOOD, dialect="vllm")
    assert result == ([1, 2], "stop")
    assert len(server.bodies) == 2


def test_two_hundred_cancellations_leave_no_request_at_the_server(tokenizer):
    async def run():
        server = RawHttpServer((STREAM, event("<|s_1|>"), 30.0))
        async with server.running() as url:
            llm = OpenAILM([url], "model", tokenizer, QUICK)
            for i in range(200):
                stream = llm.generate(PROMPT, Sampling())
                reader = asyncio.create_task(anext(stream))
                await asyncio.sleep(0.001 * (i % 4))
                reader.cancel()
                await asyncio.wait({reader})
                await stream.aclose()
            deadline = time.monotonic() + 5
            while server.live:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            outstanding = llm._endpoints[0].outstanding
            await llm.aclose()
        return outstanding

    assert asyncio.run(run()) == 0


def test_another_server_is_tried_if_one_cannot_be_reached(tokenizer):
    async def run():
        server = RawHttpServer(GOOD)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            async with server.running() as url:
                llm = OpenAILM([f"http://127.0.0.1:{unused.getsockname()[1]}", url], "model", tokenizer, QUICK)
                results = [await speak(llm) for _ in range(2)]
                await llm.aclose()
        return results

    assert asyncio.run(run()) == [([1, 2], "stop")] * 2


def test_no_other_server_is_tried_after_the_first_token(tokenizer):
    async def run():
        servers = RawHttpServer((STREAM, event("<|s_1|>"))), RawHttpServer(GOOD)
        async with servers[0].running() as first, servers[1].running() as second:
            llm = OpenAILM([first, second], "model", tokenizer, QUICK)
            with pytest.raises(UnavailableError):
                await speak(llm)
            await llm.aclose()
        return [len(server.bodies) for server in servers]

    assert asyncio.run(run()) == [1, 0]


def test_the_least_busy_server_is_used(tokenizer):
    async def run():
        servers = RawHttpServer((STREAM, event("<|s_1|>"), 30.0)), RawHttpServer(GOOD)
        async with servers[0].running() as first, servers[1].running() as second:
            llm = OpenAILM([first, second], "model", tokenizer, QUICK)
            busy = llm.generate(PROMPT, Sampling())
            await anext(busy)
            results = [await speak(llm) for _ in range(3)]
            await busy.aclose()
            await llm.aclose()
        return results, len(servers[0].bodies)

    assert asyncio.run(run()) == ([([1, 2], "stop")] * 3, 1)


def test_closing_the_stream_aborts_the_request(tokenizer):
    async def run():
        server = RawHttpServer((STREAM, event("<|s_1|>"), 30.0))
        async with server.running() as url:
            llm = OpenAILM([url], "model", tokenizer, QUICK)
            stream = llm.generate(PROMPT, Sampling())
            assert await anext(stream) == [1]
            await stream.aclose()
            await asyncio.wait_for(server.closed_by_client.wait(), 1)
            await llm.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_a_url_may_end_with_the_version(tokenizer, suffix):
    async def run():
        async with RawHttpServer(GOOD).running() as url:
            llm = OpenAILM([url + suffix], "model", tokenizer, QUICK)
            result = await speak(llm)
            await llm.aclose()
        return result

    assert asyncio.run(run()) == ([1, 2], "stop")


@pytest.mark.parametrize("urls", [[], ["localhost:8000"], ["ftp://host"]])
def test_invalid_urls_are_an_error(tokenizer, urls):
    with pytest.raises(ValueError, match="URL of an LLM server"):
        OpenAILM(urls, "model", tokenizer)
