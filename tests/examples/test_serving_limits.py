"""The server of the serving example: limits of what clients may send."""

import asyncio
import concurrent.futures
import threading
import time

import pytest

from tests.examples.test_serving_errors import (
    COMPLETIONS,
    error_of,
    make_client,
    make_server,
)

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def served():
    server = make_server()
    yield server
    server.thread.stop()


def test_a_body_that_is_too_large_is_not_read_to_its_end(served):
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b""}
    num_chunks, sent = 0, []

    async def receive():
        nonlocal num_chunks
        num_chunks += 1
        assert num_chunks < 100
        return {"type": "http.request", "body": b" " * (1 << 20), "more_body": True}

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(served.app({**scope, "headers": []}, receive, send), 60))
    assert sent[0]["status"] == 413 and num_chunks == 17


def test_a_body_of_the_largest_size_is_read(served):
    body = b'{"prompt": "a", "max_tokens": 1}'
    reply = make_client(served).post(COMPLETIONS, content=body.ljust(16 << 20))
    assert reply.status_code == 200
    error_of(make_client(served).post(COMPLETIONS, content=body.ljust((16 << 20) + 1)), 413)


@pytest.mark.parametrize(("count", "status"), [(4, 200), (5, 400)])
def test_at_most_four_stop_strings(served, count, status):
    body = {"prompt": "a", "max_tokens": 1, "stop": [f"stop {i}" for i in range(count)]}
    reply = make_client(served).post(COMPLETIONS, json=body)
    assert reply.status_code == status
    assert status == 200 or error_of(reply, 400)["param"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_more_waiting_requests_are_turned_away(served, stream, monkeypatch):
    from examples.serving import server as module

    step, goes_on = served.thread.engine.step, threading.Event()

    def step_later():
        goes_on.wait(20)
        step()

    monkeypatch.setattr(module, "MAX_WAITING", 2)
    monkeypatch.setattr(served.thread.engine, "step", step_later)
    body = {"prompt": "a", "max_tokens": 2, "stream": stream}

    def post():
        return make_client(served).post(COMPLETIONS, json=body)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = []
        try:
            for number in (1, 2):
                waiting.append(pool.submit(post))
                deadline = time.monotonic() + 60
                while served.thread.num_waiting < number and time.monotonic() < deadline:
                    time.sleep(0.001)
            error_of(post(), 503, "server_error")
        finally:
            goes_on.set()
        assert [reply.result().status_code for reply in waiting] == [200, 200]
    assert post().status_code == 200
