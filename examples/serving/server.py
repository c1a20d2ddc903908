"""An OpenAI-compatible HTTP server: completions and chat completions, also streamed.

    pip install 'jaxkv[serve]'
    python -m examples.serving.server --preset qwen3-0.6b --port 8000

One thread owns the engine. Requests come to it through a queue, and tokens go back to the event
loop of the server; the engine never waits for a client.
"""

import argparse
import asyncio
import json
import math
import queue
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import jaxkv

from .checkpoint import load_checkpoint
from .engine import Engine, Limits
from .presets import PRESETS, init_params
from .request import Request
from .sampling import Sampling
from .tokenizer import ByteTokenizer, QwenTokenizer, Tokenizer

Fields = dict[str, Any]


class EngineThread:
    """Runs the steps of an engine while it has requests."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.error: BaseException | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Request] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, action: str, request: Request) -> None:
        """Asks the thread to "submit" or "cancel" a request."""
        self._inbox.put((action, request))

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        active: set[Request] = set()
        try:
            while True:
                while not (self.engine.busy and self._inbox.empty()):
                    if (message := self._inbox.get()) is None:
                        return
                    action, request = message
                    getattr(self.engine, action)(request)
                    active.add(request)
                self.engine.step()
                active = {request for request in active if not request.finished}
        except Exception as error:
            traceback.print_exc()
            self.error = error
            for request in active:  # wakes their clients
                request.on_token(request)
            while (message := self._inbox.get()) is not None:
                if message[0] == "submit":
                    message[1].on_token(message[1])


class Server:
    """The routes; `model` is the name that clients see."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model: str):
        self.thread, self.tokenizer, self.model = EngineThread(engine), tokenizer, model
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _error})

    async def health(self, request: HTTPRequest) -> Response:
        return Response(status_code=500 if self.thread.error else 200)

    async def models(self, request: HTTPRequest) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "jaxkv"}
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(self, http: HTTPRequest) -> Response:
        chat = http.url.path.endswith("chat/completions")
        try:
            fields = await http.json()
            prompt = self._prompt(fields, chat)
            request, stop = self._request(fields, prompt)
            self.thread.engine.check(request)
            usage = bool((fields.get("stream_options") or {}).get("include_usage"))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise HTTPException(400, f"{type(error).__name__}: {error}") from error
        texts = self._texts(request, stop)
        head = {
            "id": uuid.uuid4().hex,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }
        if fields.get("stream"):
            events = self._events(head, request, texts, chat, usage)
            return StreamingResponse(events, media_type="text/event-stream")
        text = "".join([piece async for piece in texts])
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, "finish_reason": _reason(request), "logprobs": None, **content}
        return JSONResponse({**head, "choices": [choice], "usage": _usage(request)})

    def _prompt(self, fields: Fields, chat: bool) -> list[int]:
        if fields.get("n", 1) != 1:
            raise ValueError("n must be 1")
        if chat:
            return self.tokenizer.chat(fields["messages"])
        prompt = fields["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
            raise ValueError("prompt must be one string or one list of token ids")
        vocabulary = self.thread.engine.config.vocab_size
        if any(not 0 <= token < vocabulary for token in prompt):
            raise ValueError(f"token ids must be in [0, {vocabulary})")
        return prompt

    def _request(self, fields: Fields, prompt: list[int]) -> tuple[Request, list[str]]:
        stop = fields.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError("stop must be strings that are not empty")
        limits = [fields.get(name) for name in ("max_completion_tokens", "max_tokens")]
        count = next((limit for limit in limits if limit is not None), 16)
        sampling = Sampling(
            _number(fields, "temperature", 1.0),
            _number(fields, "top_p", 1.0),
            int(_number(fields, "top_k", 0)),
            int(_number(fields, "seed", uuid.uuid4().int % 2**32)),
        )
        end = None if fields.get("ignore_eos") else self.tokenizer.stop

        def stops(request: Request) -> bool:
            if request.tokens[-1] == end:
                return True
            return bool(stop) and _cut(self.tokenizer.decode(request.answer), stop)[1]

        return Request(prompt, int(count), sampling, stops), stop

    async def _texts(self, request: Request, stop: list[str]) -> AsyncIterator[str]:
        """Pieces of the answer, in whole characters, without what may become a stop string."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Request) -> None:
            loop.call_soon_threadsafe(news.set)

        request.on_token = tell
        self.thread.put("submit", request)
        sent, finished = "", False
        try:
            while not finished:
                await news.wait()
                news.clear()
                if self.thread.error:
                    raise RuntimeError("the engine failed") from self.thread.error
                finished = request.finished
                text, _ = _cut(self.tokenizer.decode(request.answer), stop)
                if not finished:
                    text = text.rstrip("\ufffd")  # a character whose last bytes are missing
                    text = text[: len(text) - max(map(len, stop), default=1) + 1]
                if len(text) > len(sent):
                    yield text[len(sent) :]
                    sent = text
        finally:
            if not finished:  # the client is gone
                self.thread.put("cancel", request)

    async def _events(
        self, head: Fields, request: Request, texts: AsyncIterator[str], chat: bool, usage: bool
    ) -> AsyncIterator[str]:
        head = {**head, "object": head["object"] + ".chunk" if chat else head["object"]}

        def event(content: Fields, reason: str | None = None) -> str:
            choice = {"index": 0, "finish_reason": reason, "logprobs": None, **content}
            return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

        if chat:
            yield event({"delta": {"role": "assistant", "content": ""}})
        async for text in texts:
            yield event({"delta": {"content": text}} if chat else {"text": text})
        yield event({"delta": {}} if chat else {"text": ""}, _reason(request))
        if usage:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(request)})}\n\n"
        yield "data: [DONE]\n\n"


def _number(fields: Fields, name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return value


def _cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text up to the first stop string, and whether there is one."""
    places = [place for part in stop if (place := text.find(part)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def _reason(request: Request) -> str:
    return "stop" if request.stop(request) else "length"


def _usage(request: Request) -> Fields:
    prompt, answer = len(request.prompt), len(request.answer)
    counts = {"prompt_tokens": prompt, "completion_tokens": answer}
    return counts | {"total_tokens": prompt + answer}


async def _error(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    content = {"message": error.detail, "type": "invalid_request_error", "code": error.status_code}
    return JSONResponse({"error": content}, status_code=error.status_code)


def main(argv: Sequence[str] | None = None) -> None:
    on_cpu = jax.devices()[0].platform == "cpu"
    parser = argparse.ArgumentParser(prog="python -m examples.serving.server")
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Qwen3 checkpoint (default: random weights)")
    add("--preset", choices=[*PRESETS], default="tiny", help="sizes of random weights")
    add("--dtype", choices=("float32", "bfloat16"), default="float32" if on_cpu else "bfloat16")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--page-size", type=int, default=16 if on_cpu else 64, help="tokens")
    add("--num-hbm-pages", type=int, default=1024)
    add("--num-host-pages", type=int, default=4096)
    add("--max-requests", type=int, default=8 if on_cpu else 64, help="running at a time")
    add("--token-budget", type=int, default=128 if on_cpu else 2048, help="tokens of a step")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="devices")
    add("--max-length", type=int, default=4096, help="tokens of prompt and answer")
    args = parser.parse_args(argv)
    tokenizer: Tokenizer = ByteTokenizer()
    if args.model:
        tokenizer = QwenTokenizer(args.model)
        config, params = load_checkpoint(args.model, args.dtype)
    else:
        config = PRESETS[args.preset]
        params = init_params(config, 0, args.dtype)
    pages = -(-args.max_length // args.page_size)
    limits = Limits(args.page_size, args.max_requests, args.token_budget, pages)
    memory = None
    if args.tensor_parallel > 1:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: args.tensor_parallel]), ("tp",))
        memory = jaxkv.SymmetricMemory.create(mesh, "tp")
    sizes = (args.num_hbm_pages, args.num_host_pages)
    engine = Engine(config, params, limits, *sizes, memory=memory)
    engine.warm_up(sampling=True)
    server = Server(engine, tokenizer, args.model.name if args.model else args.preset)
    uvicorn.run(server.app, host=args.host, port=args.port)
    server.thread.stop()


if __name__ == "__main__":
    main()
