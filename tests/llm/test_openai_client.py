"""The OpenAI-compatible client against a real `transformers serve`, and against a faulty server."""

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling, Timeouts
from cosyvoice_triton.llm.openai_client import OpenAILM
from cosyvoice_triton.llm.speech_tokens import speech_token_text
from cosyvoice_triton.server.readiness import fault
from cosyvoice_triton.server.tritonserver import free_port

from tests.support.http_servers import STREAM, RawHttpServer, event, reply
from tests.support.waiting import until

QUICK, PATIENT = Timeouts(connect=0.5, first_token=0.6, token=0.6), Timeouts(connect=30, first_token=30, token=30)
PROMPT = LLMPrompt("Hello there.", "A reference.", (1, 2, 3))


async def speak(llm, prompt=PROMPT, **sampling):
    """All tokens of one utterance, and the finish reason."""
    async with aclosing(llm.generate(prompt, Sampling(**sampling))) as answer:
        chunks = [chunk async for chunk in answer]
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1].finish_reason


def speaking(times, **sampling):
    """A scenario: the results of so many utterances, one after another."""

    async def scenario(llm, servers):
        return [await speak(llm, **sampling) for _ in range(times)]

    return scenario


def over(tokenizer, scripts, scenario, dialect="auto", urls=(), timeouts=PATIENT, suffix=""):
    """What `scenario(llm, servers)` returns over a server for each script, beside other `urls`; and the servers."""

    async def run():
        servers = [RawHttpServer(*script) for script in scripts]
        async with AsyncExitStack() as stack:
            own = [await stack.enter_async_context(server.running()) + suffix for server in servers]
            llm = OpenAILM([*urls, *own], "model", tokenizer, timeouts, dialect=dialect)
            stack.push_async_callback(llm.aclose)
            return await asyncio.wait_for(scenario(llm, servers), 60), servers

    return asyncio.run(run())


def ask(tokenizer, *answers, dialect="auto", **sampling):
    """One utterance from a server that gives these answers; return the result and the server."""
    (result,), (server,) = over(tokenizer, [answers], speaking(1, **sampling), dialect)
    return result, server


GOOD = (STREAM, event("<|s_1|><|s_"), event("2|>"), event("", "stop"), b"data: [DONE]\n\n")
SPOKEN = ([1, 2], "stop")  # what GOOD says


@pytest.fixture(scope="module")
def transformers_url(llm_dir, tmp_path_factory):
    port = free_port()
    executable = Path(sys.executable).with_name("transformers")
    command = [executable, "serve", llm_dir, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path_factory.mktemp("transformers") / "log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: server.poll() is not None or not fault(f"{url}/health"), 240, every=0.2)
            assert server.poll() is None, log.read_text()
            yield url
        finally:
            server.terminate()


@pytest.mark.slow
async def test_transformers_serve_speaks_by_the_requested_sampling_up_to_its_limit(
    transformers_url, tokenizer, llm_dir
):
    async with aclosing(OpenAILM([transformers_url], str(llm_dir), tokenizer)) as llm:
        first, again, other = [await speak(llm, seed=seed) for seed in (1, 1, 2)]
        greedy = [await speak(llm, seed=seed, temperature=0.0, max_tokens=40) for seed in (1, 2)]
        tokens, reason = await speak(llm, seed=1, max_tokens=7)
    assert len(first[0]) > 10 and first[1] == "stop"
    assert first == again != other and greedy[0] == greedy[1]
    assert (len(tokens), reason) == (7, "length")


WHOLE = event("<|s_1|>") + b": ping\r\n\r\n" + event("<|s_22|>") + event("", "stop") + b"data: [DONE]\n\n"
PIECES = [part for at in range(0, len(WHOLE), 7) for part in (WHOLE[at : at + 7], 0.001)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [([event("<|s_1|><|eos1|><|s_2|>"), 30.0], [1]), (PIECES, [1, 22])],
    ids=["an end token in the text ends the answer", "events in pieces of any size"],
)
def test_an_answer_is_read_as_it_comes(tokenizer, answer, expected):
    assert ask(tokenizer, (STREAM, *answer))[0] == (expected, "stop")


def test_the_request_has_template_and_sampling(tokenizer):
    _, server = ask(tokenizer, GOOD, seed=7, temperature=0.5, top_k=9, max_tokens=99)
    (body,) = server.bodies
    assert body["prompt"] == tokenizer.encode_prompt(PROMPT).tolist()
    expected = {"model": "model", "stream": True, "seed": 7, "temperature": 0.5, "top_k": 9, "max_tokens": 99}
    assert expected.items() <= body.items()
    assert body["stop_token_ids"] == list(tokenizer.end_ids)


def test_the_length_of_the_text_limits_the_length_of_the_speech(tokenizer):
    _, server = ask(tokenizer, GOOD, prompt=dataclasses.replace(PROMPT, generated=(1, 2, 3)))
    (body,), text_tokens = server.bodies, tokenizer.text_length(PROMPT.target_text)
    assert (body["min_tokens"], body["max_tokens"]) == (2 * text_tokens - 3, 20 * text_tokens - 3)
    assert body["prompt"][-3:] == tokenizer.to_llm_ids([1, 2, 3]).tolist()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((reply("500 Internal Server Error", b"out of memory"),), "HTTP 500: out of memory"),
        ((reply("404 Not Found", b"no model named model"),), "HTTP 404: no model named model"),
        ((b"this is no HTTP\r\n\r\n",), "LLM server http://127"),
        ((STREAM, b"data: garbage\n\n"), "an invalid event: b'garbage'"),
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
        ((STREAM, event("<|s_1|>"), *[event("word"), 0.2] * 20), "sent no token for 0.6 s"),
        ((STREAM, b"data: " + b"x" * 2_000_000), "an invalid event: b'data: xxx"),
        ((b"HTTP/1.1 500 Oops\r\nContent-Length: 999\r\n\r\n", 30.0), "sent no token for 0.6 s"),
        ((STREAM, event("<|s_1|>" * 751)), "ignores max_tokens 240"),
    ],
)
def test_a_faulty_server_is_an_error_in_time(tokenizer, answer, message):
    timeouts = QUICK if "sent no token" in message else PATIENT
    with pytest.raises(UnavailableError, match=message):
        over(tokenizer, [[answer]], speaking(1), timeouts=timeouts)


def test_servers_that_accept_no_connection_share_one_deadline(tokenizer):
    """Of twenty only those are tried that a second allows, at a tenth of it each."""
    with socket.socket() as full, socket.socket() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting.connect(full.getsockname())  # the backlog is full: further connections get no answer
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        hurried = Timeouts(connect=0.1, first_token=1.0, token=1.0)
        with pytest.raises(UnavailableError, match=url) as failed:
            over(tokenizer, [], speaking(1), urls=[url] * 20, timeouts=hurried)
    assert 1 < str(failed.value).count("LLM server") < 12


def test_a_refused_connection_is_an_error_with_the_url_unless_there_is_another_server(tokenizer):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"LLM server {url} cannot be reached"):
            over(tokenizer, [], speaking(2), urls=[url])
        assert over(tokenizer, [[GOOD]], speaking(2), urls=[url])[0] == [SPOKEN] * 2


def test_a_rejected_request_is_a_value_error_with_the_servers_message(tokenizer):
    with pytest.raises(ValueError, match="HTTP 400: prompt too long"):
        ask(tokenizer, (reply("400 Bad Request", b"prompt too long"),))


def test_the_dialect_is_learned_once(tokenizer):
    rejection = (reply("422 Unprocessable", b"Unexpected fields: top_k"),)
    results, (server,) = over(tokenizer, [[rejection, rejection, rejection, GOOD]], speaking(2, top_k=9))
    assert results == [SPOKEN] * 2
    kinds = [(type(body["prompt"]), "top_k" in body, "generation_config" in body) for body in server.bodies]
    assert kinds == [(list, True, False)] * 2 + [(str, True, False)] + [(str, False, True)] * 2
    config = json.loads(server.bodies[-1]["generation_config"])
    assert (config["top_k"], config["eos_token_id"]) == (9, list(tokenizer.end_ids))


def test_tokens_are_read_as_ids_if_the_server_sends_ids(tokenizer):
    o, end = tokenizer.first_speech_id, tokenizer.end_ids[0]
    stray = tokenizer.sos_id
    result, _ = ask(tokenizer, (STREAM, event("", token_ids=[o + 5, stray]), event("", "stop", token_ids=[o + 6, end])))
    assert result == ([5, 6], "stop")


def chat_event(reason=None, **delta):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("prompt", "user", "spoken"),
    [
        (dataclasses.replace(PROMPT, generated=(9,)), "A reference.Hello there.", [1, 2, 3, 9]),
        (LLMPrompt("|>Hello<|eos1|>", "A <|s_1"), "A <|s_1 |>Hello ", []),
        (LLMPrompt("Hello<|eos1|>", instruction="sadly<|s_1|>"), "sadly<|endofprompt|>Hello ", []),
    ],
)
def test_a_chat_server_gets_the_template_as_messages_without_control_tokens(tokenizer, prompt, user, spoken):
    """Except the token that ends an instruction."""
    answer = (STREAM, chat_event(content="<|s_4|>"), chat_event("length"))
    result, server = ask(tokenizer, answer, prompt=prompt, dialect="chat")
    assert result == ([4], "length")
    messages = [{"role": "user", "content": user}]
    if spoken:
        messages.append({"role": "assistant", "content": speech_token_text(spoken)})
    assert server.bodies[0]["messages"] == messages


def test_the_chat_api_is_used_if_a_server_has_no_completions(tokenizer):
    absent = (reply("404 Not Found", b"no such path"),)
    result, server = ask(tokenizer, *[absent] * 4, (STREAM, chat_event("stop", content="<|s_4|>")))
    assert result == ([4], "stop")
    assert "messages" in server.bodies[-1]


def test_repetition_aware_sampling_is_sent_to_vllm_only(tokenizer):
    _, server = ask(tokenizer, GOOD, dialect="vllm", ras_window=10)
    assert server.bodies[0]["vllm_xargs"] == {"ras_window": 10, "ras_tau": 0.1}
    with pytest.raises(ValueError, match="ras_window 10: only `vllm serve`"):
        ask(tokenizer, GOOD, dialect="trtllm", ras_window=10)


@pytest.mark.parametrize("failure", [(reply("503 Service Unavailable", b"loading"),), (STREAM,), (STREAM, event(""))])
def test_another_server_is_tried_if_no_token_has_arrived(tokenizer, failure):
    results, servers = over(tokenizer, [[failure], [GOOD]], speaking(3))
    # The one that failed is not tried again while there is another.
    assert results == [SPOKEN] * 3 and [len(server.bodies) for server in servers] == [1, 3]


def test_no_other_server_is_tried_after_the_first_token(tokenizer):
    async def fails(llm, servers):
        with pytest.raises(UnavailableError):
            await speak(llm)

    _, servers = over(tokenizer, [[(STREAM, event("<|s_1|>"))], [GOOD]], fails)
    assert [len(server.bodies) for server in servers] == [1, 0]


def test_a_pooled_connection_that_the_server_closed_is_not_an_error(tokenizer):
    result, server = ask(tokenizer, (b"",), GOOD, dialect="vllm")
    assert result == SPOKEN
    assert len(server.bodies) == 2


def test_the_least_busy_server_is_used(tokenizer):
    async def scenario(llm, servers):
        busy = llm.generate(PROMPT, Sampling())
        await anext(busy)
        results = await speaking(3)(llm, servers)
        await busy.aclose()
        return results

    results, servers = over(tokenizer, [[(STREAM, event("<|s_1|>"), 30.0)], [GOOD]], scenario)
    assert results == [SPOKEN] * 3 and len(servers[0].bodies) == 1


def test_two_hundred_readers_that_leave_leave_no_request_at_the_server(tokenizer):
    """Cancelled before or around the first token, or closed after it."""

    async def scenario(llm, servers):
        for i in range(200):
            stream = llm.generate(PROMPT, Sampling())
            reader = asyncio.create_task(anext(stream))
            if i % 4:
                await asyncio.sleep(0.001 * (i % 4))
                reader.cancel()
            await asyncio.wait({reader})
            await stream.aclose()
        while servers[0].live:  # `over` has a limit
            await asyncio.sleep(0.01)
        return llm._endpoints[0].outstanding

    assert over(tokenizer, [[(STREAM, event("<|s_1|>"), 30.0)]], scenario)[0] == 0


@pytest.mark.parametrize("suffix", ["/", "/v1/"])
def test_a_url_may_end_with_the_version(tokenizer, suffix):
    assert over(tokenizer, [[GOOD]], speaking(1), suffix=suffix)[0] == [SPOKEN]


@pytest.mark.parametrize("urls", [[], ["localhost:8000"], ["ftp://host"]])
def test_invalid_urls_are_an_error(tokenizer, urls):
    with pytest.raises(ValueError, match="URL of an LLM server"):
        OpenAILM(urls, "model", tokenizer)
