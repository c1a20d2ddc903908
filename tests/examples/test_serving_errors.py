"""The serving example: invalid requests and options, clients that leave, and a failed engine."""

import asyncio
import importlib
import itertools
import json
import os
import threading
import time

import pytest

from examples.serving.engine import Engine, Limits
from examples.serving.model import Config
from examples.serving.presets import init_params
from examples.serving.tokenizer import ByteTokenizer
from jaxkv._src.cache.host_layout import LAYOUTS

pytestmark = pytest.mark.end_to_end

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CONFIG = Config(256, 64, 96, 2, 4, 2, 16)
LIMITS = Limits(page_size=8, batch=4, token_budget=40, pages_per_request=40, copy_pages=8)
ROOM = 8 * 40
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def make_server():
    from examples.serving.server import Server

    engine = Engine(CONFIG, init_params(CONFIG, 0, "float32"), LIMITS, 100)
    return Server(engine, ByteTokenizer(), "tiny")


def make_client(server):
    from starlette.testclient import TestClient

    return TestClient(server.app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def served():
    server = make_server()
    yield server
    server.thread.stop()


@pytest.fixture(scope="module")
def client(served):
    return make_client(served)


def error_of(reply, status, kind="invalid_request_error"):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == kind
    assert error["message"] and error["code"] is None
    return error


# --- Requests.


@pytest.mark.parametrize("content", [[{"type": "text", "text": "hello"}], "hello"])
def test_text_parts_are_the_same_as_a_string(client, content):
    messages = [{"role": "user", "content": content}]
    reply = client.post(CHAT, json={"messages": messages, "max_tokens": 1})
    prompt = len(ByteTokenizer().chat(HELLO))
    assert reply.json()["usage"]["prompt_tokens"] == prompt == len("User: hello\n\nAssistant: ")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    tokens = ByteTokenizer().chat([{"role": "user", "content": parts}])
    assert bytes(tokens) == b"User: a\nb\n\nAssistant: "


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        "hello",
        ["hello"],
        [{"content": "hello"}],
        [{"role": 1, "content": "hello"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": ["hello"]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_messages_other_than_text_are_rejected(client, messages):
    reply = client.post(CHAT, json={"messages": messages, "max_tokens": 1})
    error = error_of(reply, 400)
    assert error["param"] == "messages" and "messages" in error["message"]


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[]", b"null", b"{", b"\xff"])
def test_bodies_other_than_an_object_are_rejected(client, body):
    error_of(client.post(COMPLETIONS, content=body), 400)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in ("3", 2.9, True)],
        ("max_completion_tokens", "3"),
        ("stream", "false"),
        ("stream_options", "all"),
        ("stop", {"a": 1}),
        ("stop", 5),
        ("stop", [1]),
        *[("seed", value) for value in (1.5, "1", 10**400)],
        *[("temperature", value) for value in ("1", True)],
        ("top_p", "1"),
        ("top_k", 1.5),
        ("ignore_eos", 1),
        *[("n", value) for value in (2, True)],
        *[("logprobs", value) for value in (5, 0, True)],
        ("echo", True),
        ("best_of", 3),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("logit_bias", {"50256": -100}),
        *[(f"{kind}_penalty", 0.5) for kind in ("presence", "frequency", "repetition")],
        ("suffix", "b"),
    ],
)
def test_error_of_a_field_names_it(client, name, value):
    reply = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, name: value})
    error = error_of(reply, 400)
    assert error["param"] == name and error["message"].startswith(name)


@pytest.mark.parametrize(
    "options",
    [
        dict.fromkeys(["n", "logprobs", "echo", "best_of", "response_format", "stop", "seed"]),
        {"n": 1, "logprobs": False, "echo": False, "best_of": 1},
        {"response_format": {"type": "text"}, "stop": [], "temperature": 0, "top_p": 0.5},
        dict.fromkeys(["model", "stream", "stream_options", "temperature", "top_p", "top_k"]),
        {"model": "tiny", "stop": "", "suffix": "", "tools": [], "logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    ],
)
def test_neutral_values_are_accepted(client, options):
    reply = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, **options})
    assert reply.status_code == 200, reply.text


def test_models(client):
    assert client.get("/v1/models/tiny").json() == client.get("/v1/models").json()["data"][0]
    reply = client.post(COMPLETIONS, json={"prompt": "a", "model": "other"})
    for answer in (reply, client.get("/v1/models/other")):
        assert error_of(answer, 404)["param"] == "model"


def test_default_length_of_answers(client):
    usage = client.post(CHAT, json={"messages": HELLO}).json()["usage"]
    assert usage["total_tokens"] == ROOM
    usage = client.post(COMPLETIONS, json={"prompt": "hello"}).json()["usage"]
    assert usage["completion_tokens"] == 16


def test_error_of_a_chat_that_is_too_long_has_no_negative_length(client):
    messages = [{"role": "user", "content": "x" * ROOM}]
    message = error_of(client.post(CHAT, json={"messages": messages}), 400)["message"]
    assert f"{len(ByteTokenizer().chat(messages))} prompt tokens and 1 new ones" in message


# --- Clients that leave, and a failed engine.


def call(server, path, body, more_body, gone):
    """The status of a request whose client leaves once `gone` returns true, or None."""
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    first = [{"type": "http.request", "body": body, "more_body": more_body}]
    sent = []

    async def receive():
        if first:
            return first.pop()
        while not gone():
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(server.app(scope, receive, send), 60))
    return sent[0]["status"]


def test_request_ends_when_its_client_leaves(served, monkeypatch):
    requests, put, step = [], served.thread.put, served.thread.engine.step
    left = threading.Event()

    def record(action, request):
        requests.append(request)
        put(action, request)
        if action == "cancel":
            left.set()

    def step_until_left():
        if requests and requests[0].answer:
            left.wait(30)
        return step()

    monkeypatch.setattr(served.thread, "put", record)
    monkeypatch.setattr(served.thread.engine, "step", step_until_left)
    body = json.dumps({"prompt": "a", "max_tokens": ROOM - 1}).encode()
    call(served, COMPLETIONS, body, False, lambda: requests and requests[0].answer)
    deadline = time.monotonic() + 30
    while not requests[0].finished and time.monotonic() < deadline:
        time.sleep(0.01)
    assert requests[0].finished and len(requests[0].answer) < ROOM - 1
    assert not served.thread.error


def test_client_that_leaves_during_its_upload_is_no_error(served):
    assert call(served, COMPLETIONS, b'{"prompt"', True, lambda: True) == 499


def test_streams_of_a_failed_engine_end_with_an_error(monkeypatch, capsys):
    server = make_server()
    client, step = make_client(server), server.thread.engine.step
    steps = itertools.count()

    def fail_later():
        if next(steps) == 5:
            raise MemoryError("no more")
        step()

    monkeypatch.setattr(server.thread.engine, "step", fail_later)
    body = {"prompt": "a", "max_tokens": 50}
    reply = client.post(COMPLETIONS, json={**body, "stream": True})
    events = [json.loads(event[6:]) for event in reply.text.split("\n\n") if event]
    assert reply.status_code == 200 and events[-1]["error"]["type"] == "server_error"
    assert all("error" not in event for event in events[:-1])
    for options in ({}, {"stream": True}):
        error_of(client.post(COMPLETIONS, json=body | options), 500, "server_error")
    server.thread.stop()
    assert "no more" in capsys.readouterr().err


# --- Options of the commands.


@pytest.mark.parametrize(
    "option",
    [
        "--page-size=0",
        "--max-requests=0",
        "--max-length=0",
        "--num-hbm-pages=0",
        "--num-host-pages=-1",
        "--tensor-parallel=0",
        "--tensor-parallel=3",
        "--tensor-parallel=1000",
        "--token-budget=8",
        "--max-length=1000000",
        "--model=/none",
    ],
)
def test_server_rejects_option(option, capsys):
    from examples.serving.server import main

    with pytest.raises(SystemExit) as error:
        main([option, "--max-requests=8"] if "requests" not in option else [option])
    assert error.value.code == 2 and "error: " in capsys.readouterr().err


@pytest.mark.cpu_only  # one GPU is rejected before
def test_server_rejects_devices_that_do_not_divide_the_heads():
    from examples.serving.server import main

    with pytest.raises(SystemExit, match="--tensor-parallel: it must divide the 2 KV heads"):
        main(["--preset=tiny", "--tensor-parallel=4"])


def test_model_in_the_working_directory_has_the_name_of_that(tmp_path, monkeypatch):
    from starlette.testclient import TestClient

    from examples.serving import server

    names: list[str] = []
    folder = tmp_path / "qwen3"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(server, "QwenTokenizer", lambda _: ByteTokenizer())
    weights = CONFIG, init_params(CONFIG, 0, "float32")
    monkeypatch.setattr(server, "load_checkpoint", lambda *_: weights)
    monkeypatch.setattr(Engine, "warm_up", lambda *_, **__: None)

    def run(app, **_):
        names.extend(model["id"] for model in TestClient(app).get("/v1/models").json()["data"])

    monkeypatch.setattr(server.uvicorn, "run", run)
    server.main(["--model=.", "--max-length=64", "--num-hbm-pages=16", "--num-host-pages=0"])
    assert names == ["qwen3"]


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "file").write_text("")
    return {"folder": str(tmp_path), "file": str(tmp_path / "file")}


@pytest.mark.parametrize(
    "option",
    [
        "--prompts={folder}",
        "--prompts={folder}/none",
        "--tier={file}",
        "--tier={file}/below",
        "--json={folder}",
        "--json={folder}/none/out.json",
        "--plot={folder}/none/out.png",
        "--plot={folder}/out.text",
        "--seed=-1",
        f"--seed={2**32}",
        "--layout=other",
        "--model={folder}",
        "--model={folder}/none",
    ],
)
def test_demo_rejects_option_before_the_runs(option, paths, capsys):
    command = importlib.import_module("examples.serving.__main__")
    with pytest.raises(SystemExit) as error:
        command.parse([option.format(**paths)], on_cpu=True)
    message = capsys.readouterr().err.splitlines()[-1]
    assert error.value.code == 2 and f"argument {option.split('=')[0]}: " in message


def test_demo_accepts_options(paths):
    command = importlib.import_module("examples.serving.__main__")
    folder = paths["folder"]
    given = [f"--tier={folder}/a/b", f"--json={folder}/out.json", f"--seed={2**32 - 1}"]
    args = command.parse(given, on_cpu=True)
    assert args.seed == 2**32 - 1 and os.listdir(folder) == ["file"]
    assert command.LAYOUTS == LAYOUTS


def test_results_are_written_before_the_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    command = importlib.import_module("examples.serving.__main__")
    monkeypatch.setattr(command, "PRESETS", {"tiny": CONFIG, "qwen3-0.6b": CONFIG})
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"id": "a", "turns": ["b"]}\n')

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(command.report, "plot", fail)
    options = [f"--prompts={prompts}", f"--json={out}", f"--plot={tmp_path / 'out.png'}"]
    with pytest.raises(OSError, match="disk full"):
        command.main([*options, "--max-new-tokens=2", "--dtype=float32"])
    assert json.loads(out.read_text())["turns"]


def test_weights_of_a_tier_are_named_by_their_files(tmp_path, monkeypatch):
    command = importlib.import_module("examples.serving.__main__")
    names = []

    def name(folder):
        monkeypatch.chdir(folder)
        args = command.parse(["--model=checkpoint"], on_cpu=True)
        names.append(command.name_weights(args))

    for folder in ("a", "b"):
        (tmp_path / folder / "checkpoint").mkdir(parents=True)
        for file in ("m.safetensors", "config.json", "tokenizer.json"):
            (tmp_path / folder / "checkpoint" / file).write_text("1")
        name(tmp_path / folder)
    weights = tmp_path / "b" / "checkpoint" / "m.safetensors"
    name(tmp_path / "b")
    assert names[1] == names.pop()
    weights.write_text("12")
    name(tmp_path / "b")
    os.utime(weights, ns=(0, 0))
    name(tmp_path / "b")
    assert len(set(names)) == 4
