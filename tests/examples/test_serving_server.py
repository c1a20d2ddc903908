"""The HTTP server of the serving example, driven by the `openai` client on loopback."""

import concurrent.futures
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import jax
import pytest

from examples.serving.engine import Engine, Limits
from examples.serving.model import Config
from examples.serving.presets import init_params
from examples.serving.request import Request
from examples.serving.tokenizer import ByteTokenizer
from tests.util.sparse_cases import Pair

pytestmark = pytest.mark.end_to_end

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

CONFIG = Config(256, 64, 96, 2, 4, 2, 16)
LIMITS = Limits(page_size=8, batch=4, token_budget=40, pages_per_request=40, copy_pages=8)
PROMPT = "The quick brown fox"


def make_engine():
    return Engine(CONFIG, init_params(CONFIG, 0, "float32"), LIMITS, 100, 100)


@pytest.fixture(scope="module")
def served():
    """A client, and the server that it talks to."""
    from examples.serving.server import Server

    engine = make_engine()
    engine.warm_up(sampling=True)
    server = Server(engine, ByteTokenizer(), "tiny")
    http = uvicorn.Server(uvicorn.Config(server.app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            while not http.started:
                time.sleep(0.01)
            yield client, server
        http.should_exit = True
        thread.join()
    server.thread.stop()


@pytest.fixture(scope="module")
def expected():
    """The greedy answer of an engine without a server."""
    engine, request = make_engine(), Request(ByteTokenizer().encode(PROMPT), 20)
    engine.submit(request)
    while engine.busy:
        engine.step()
    return ByteTokenizer().decode(request.answer)


def complete(client, **options):
    options = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, **options}
    return client.completions.create(model="tiny", **options)


def test_completion(served, expected):
    client, _ = served
    assert [model.id for model in client.models.list()] == ["tiny"]
    done = complete(client)
    assert done.choices[0].text == expected
    assert done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT), 20)
    assert complete(client, prompt=list(PROMPT.encode())).choices[0].text == expected


def test_streamed_completion(served, expected, monkeypatch):
    client, server = served
    step, read = server.thread.engine.step, threading.Semaphore(2)

    def step_after_read():
        # Texts that the client has not read come as one. A token may end no character.
        read.acquire(timeout=1.0)
        return step()

    monkeypatch.setattr(server.thread.engine, "step", step_after_read)
    chunks = []
    for chunk in complete(client, stream=True, stream_options={"include_usage": True}):
        chunks.append(chunk)
        read.release()
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected and sum(map(bool, texts)) > 3
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 20


@pytest.mark.parametrize(("stops", "reason"), [(True, "stop"), (False, "length")])
def test_finish_reason_at_the_limit_of_tokens(stops, reason):
    from examples.serving.server import _reason

    request = Request([1], 1, stop=lambda request: stops)
    request.tokens.append(2)
    assert _reason(request) == reason


def test_stop_string(served, expected):
    client, _ = served
    stop = expected[6:8]
    cut = expected[: expected.index(stop)]
    done = complete(client, stop=[stop])
    assert (done.choices[0].text, done.choices[0].finish_reason) == (cut, "stop")
    chunks = complete(client, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "sent"),
    [
        ("abcdeXYZ", "abcde", ""),
        ("</answer>tail", "</answer>", ""),
        ("Yes.</answer>tail", "</answer>", "Yes."),
    ],
)
def test_no_part_of_a_stop_string_is_sent(served, monkeypatch, text, stop, sent, stream):
    """Also while the answer is shorter than the stop string; the server sees every token."""
    client, server = served
    engine = server.thread.engine
    step, append, seen = engine.step, engine._append, threading.Semaphore(2)

    class Watched(ByteTokenizer):
        def decode(self, tokens):
            if threading.current_thread() is not server.thread._thread:
                seen.release()
            return super().decode(tokens)

    def append_scripted(request, _):
        append(request, ord(text[min(len(request.answer), len(text) - 1)]))

    def step_after_token_was_seen():
        seen.acquire(timeout=1.0)
        return step()

    monkeypatch.setattr(server, "tokenizer", Watched())
    monkeypatch.setattr(engine, "_append", append_scripted)
    monkeypatch.setattr(engine, "step", step_after_token_was_seen)
    done = complete(client, stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in done] if stream else done.choices
    assert ("".join(choice.text for choice in choices), choices[-1].finish_reason) == (sent, "stop")


@pytest.mark.parametrize(("fields", "stops"), [({}, True), ({"ignore_eos": True}, False)])
def test_any_of_the_stop_tokens_ends_an_answer(served, monkeypatch, fields, stops):
    _, server = served
    monkeypatch.setattr(server.tokenizer, "stop", frozenset({5, 7}), raising=False)
    request, _ = server._request(fields, [1], chat=False)
    for token, expected in ((5, stops), (7, stops), (6, False)):
        request.tokens = [1, token]
        assert request.stop(request) == expected


def test_chat_and_its_stream_are_equal(served):
    client, _ = served
    options = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Who are you?"}],
        "max_completion_tokens": 12,
        "temperature": 0.8,
        "seed": 5,
    }
    whole = client.chat.completions.create(**options).choices[0].message
    assert whole.role == "assistant" and whole.content
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.content


def test_concurrent_requests(served, expected):
    client, _ = served
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: complete(client).choices[0].text, range(12)))
    assert answers == [expected] * 12


def test_request_of_a_client_that_is_gone_ends(served):
    client, server = served
    stream = complete(client, max_tokens=280, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while server.thread.engine.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.thread.engine.busy


def test_clients_of_a_failed_engine_get_an_error(monkeypatch, capsys):
    from starlette.testclient import TestClient

    from examples.serving.server import Server

    engine = make_engine()
    server = Server(engine, ByteTokenizer(), "tiny")

    def fail():
        raise MemoryError("no more")

    monkeypatch.setattr(engine, "step", fail)
    client = TestClient(server.app, raise_server_exceptions=False)
    assert client.get("/health").status_code == 200
    for _ in range(2):  # while it fails, and afterwards
        assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 500
    assert client.get("/health").status_code == 500
    server.thread.stop()
    assert "no more" in capsys.readouterr().err


def test_an_error_that_a_device_counts_ends_the_engine(capsys):
    from starlette.testclient import TestClient

    from examples.serving.server import Server

    server = Server(make_engine(), ByteTokenizer(), "tiny")
    client = TestClient(server.app, raise_server_exceptions=False)
    jax.block_until_ready(Pair().fetch([[1, 99, 2], [1, 2, 3], [1, 2, 3]]))
    for _ in range(2):
        assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 500
    assert client.get("/health").status_code == 500
    server.thread.stop()
    assert "PageIndexError" in capsys.readouterr().err


def test_numbers_out_of_range_do_not_end_the_engine(served):
    client, server = served
    assert (
        complete(client, temperature=1, extra_body={"top_k": 2**31}).usage.completion_tokens == 20
    )
    body = b'{"prompt": "a", "max_tokens": Infinity}'
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(f"{str(client.base_url).rstrip('/')}/completions", data=body)
    assert server.thread.error is None


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1000},
        {"max_tokens": 0},
        {"prompt": ""},
        {"prompt": ["a", "b"]},
        {"prompt": [256]},
        {"temperature": -1},
        {"n": 2},
        {"extra_body": {"min_p": 0.1}},
        {"extra_body": {"functions": [{"name": "f"}]}},
        {"stop": [""]},
        {"seed": 10**400},
        {"stream": True, "stream_options": "all"},
    ],
)
def test_invalid_requests_are_rejected(served, options):
    client, _ = served
    with pytest.raises(openai.BadRequestError):
        complete(client, **options)


SERVER = """
from examples.serving import server

class Idle:
    busy, waiting, warm_up = False, (), lambda self, sampling: None
    def __init__(self, *arguments, **options): pass

server.Engine, server.SHUTDOWN_WITHIN_S = Idle, 1
server.main(["--port", "0"])
"""


def test_an_incomplete_request_does_not_keep_the_server_from_ending():
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            lines = iter(process.stderr.readline, "")
            port = next(int(found[1]) for line in lines if (found := re.search(r":(\d+) ", line)))
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n")
                client.sendall(b"Expect: 100-continue\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 100")  # the server waits for the body
                process.terminate()
                process.wait(30)
        finally:
            process.kill()
