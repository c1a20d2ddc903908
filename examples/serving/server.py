"""An OpenAI-compatible HTTP server: completions and chat completions, also streamed.

    pip install '.[serve]'  # in a clone
    python -m examples.serving.server --preset qwen3-0.6b --port 8000

One thread owns the engine. Requests come to it through a queue, and tokens go back to the event
loop of the server; the engine never waits for a client.
"""

import argparse
import asyncio
import contextlib
import json
import queue
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from reprlib import repr as shortened
from typing import Any

import jax
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import jaxkv

from .__main__ import checkpoint, natural, positive
from .answer_text import AnswerText
from .api import (
    APIError,
    Fields,
    check_neutral,
    error_object,
    error_response,
    field_of,
    read_fields,
    stop_strings,
)
from .checkpoint import load_checkpoint
from .engine import Engine, Limits
from .presets import PRESETS, init_params
from .request import Request
from .sampling import Sampling
from .tokenizer import ByteTokenizer, QwenTokenizer, Tokenizer

MAX_WAITING = 1024  # requests
SHUTDOWN_WITHIN_S = 20  # for answers in progress; a client may never end its request


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

    @property
    def num_waiting(self) -> int:
        """Requests that no step has begun, and messages that the thread has not read."""
        return self._inbox.qsize() + len(self.engine.waiting)

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
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        handlers = {HTTPException: error_response, Exception: error_response}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    async def health(self, request: HTTPRequest) -> Response:
        return Response(status_code=500 if self.thread.error else 200)

    async def models(self, request: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: HTTPRequest) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def complete(self, http: HTTPRequest) -> Response:
        try:
            return await self._complete(http, http.url.path.endswith("chat/completions"))
        except ClientDisconnect:
            return Response(status_code=499)  # for logs

    async def _complete(self, http: HTTPRequest, chat: bool) -> Response:
        try:
            fields = await read_fields(http)
            self._check_model(fields.get("model"))
            request, stop = self._request(fields, self._prompt(fields, chat), chat)
            self.thread.engine.check(request)
            stream = field_of(fields, "stream", False, bool)
            options = field_of(fields, "stream_options", {}, dict)
            usage = field_of(options, "include_usage", False, bool)
        except (RecursionError, ValueError) as error:
            raise APIError(400, str(error)) from error
        self._check_engine()
        if self.thread.num_waiting >= MAX_WAITING:
            raise APIError(503, f"{MAX_WAITING} requests are waiting")
        texts = self._texts(request, stop)
        head = {
            "id": uuid.uuid4().hex,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }
        if stream:
            events = self._events(head, request, texts, chat, usage)
            return StreamingResponse(events, media_type="text/event-stream")
        text = await _unless_gone(http, _joined(texts))
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, "finish_reason": _reason(request), "logprobs": None, **content}
        return JSONResponse({**head, "choices": [choice], "usage": _usage(request)})

    def _model(self) -> Fields:
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "jaxkv"}

    def _check_model(self, name: object) -> None:
        if name not in (None, self.model):
            raise APIError(404, f"the model {shortened(name)} does not exist", "model")

    def _check_engine(self) -> None:
        if self.thread.error:
            raise APIError(500, "the engine failed") from self.thread.error

    def _prompt(self, fields: Fields, chat: bool) -> list[int]:
        if chat:
            try:
                return self.tokenizer.chat(fields.get("messages"))
            except ValueError as error:
                raise APIError(400, str(error), "messages") from error
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
            raise APIError(400, "prompt must be one string or one list of token ids", "prompt")
        vocabulary = self.thread.engine.config.vocab_size
        if any(not 0 <= token < vocabulary for token in prompt):
            raise APIError(400, f"token ids must be in [0, {vocabulary})", "prompt")
        return prompt

    def _request(self, fields: Fields, prompt: list[int], chat: bool) -> tuple[Request, list[str]]:
        check_neutral(fields)
        stop = stop_strings(fields)
        limits = self.thread.engine.limits
        room = limits.page_size * limits.pages_per_request - len(prompt)
        count = field_of(fields, "max_tokens", max(room, 1) if chat else 16, int)
        count = field_of(fields, "max_completion_tokens", count, int)
        sampling = Sampling(
            field_of(fields, "temperature", 1.0, float),
            field_of(fields, "top_p", 1.0, float),
            field_of(fields, "top_k", 0, int),
            field_of(fields, "seed", uuid.uuid4().int % 2**32, int),
        )
        ends = frozenset() if field_of(fields, "ignore_eos", False, bool) else self.tokenizer.stop

        text = AnswerText(self.tokenizer.decode, stop, len(prompt))

        def stops(request: Request) -> bool:
            if stop:
                text.update(request.tokens, request.finished)
            return text.stopped or request.tokens[-1] in ends

        return Request(prompt, count, sampling, stops), stop

    async def _texts(self, request: Request, stop: list[str]) -> AsyncIterator[str]:
        """Pieces of the answer, in whole characters, without what may become a stop string."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Request) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(news.set)

        request.on_token = tell
        self.thread.put("submit", request)
        answer = AnswerText(self.tokenizer.decode, stop, len(request.prompt))
        sent, finished = 0, False
        try:
            while not finished:
                await news.wait()
                news.clear()
                self._check_engine()
                finished = request.finished
                answer.update(request.tokens, finished)
                end = len(answer.text) - (0 if finished else answer.longest_stop - 1)
                if end > sent:
                    yield answer.text[sent:end]
                    sent = end
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
        try:
            async for text in texts:
                yield event({"delta": {"content": text}} if chat else {"text": text})
        except APIError as error:
            yield f"data: {json.dumps(error_object(error))}\n\n"
            return
        yield event({"delta": {}} if chat else {"text": ""}, _reason(request))
        if usage:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(request)})}\n\n"
        yield "data: [DONE]\n\n"


async def _joined(texts: AsyncIterator[str]) -> str:
    return "".join([text async for text in texts])


async def _unless_gone(http: HTTPRequest, answer: Coroutine[Any, Any, str]) -> str:
    """The answer, which is cancelled if the client disconnects, as ClientDisconnect says."""

    async def wait_until_gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.create_task(answer), asyncio.create_task(wait_until_gone())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


def _reason(request: Request) -> str:
    return "stop" if request.stop(request) else "length"


def _usage(request: Request) -> Fields:
    prompt, answer = len(request.prompt), len(request.answer)
    counts = {"prompt_tokens": prompt, "completion_tokens": answer}
    return counts | {"total_tokens": prompt + answer}


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Limits]:
    on_cpu = jax.devices()[0].platform == "cpu"
    parser = argparse.ArgumentParser(prog="python -m examples.serving.server")
    add = parser.add_argument
    add("--model", type=checkpoint, metavar="DIR", help="Qwen3 checkpoint; default: random weights")
    add("--preset", choices=[*PRESETS], default="tiny", help="sizes of random weights")
    add("--dtype", choices=("float32", "bfloat16"), default="float32" if on_cpu else "bfloat16")
    add("--host", default="127.0.0.1")
    add("--port", type=natural, default=8000)
    add("--page-size", type=positive, default=16 if on_cpu else 64, help="tokens")
    add("--num-hbm-pages", type=positive, default=1024)
    add("--num-host-pages", type=natural, default=4096)
    add("--max-requests", type=positive, default=8 if on_cpu else 64, help="running at a time")
    budget = 128 if on_cpu else 2048
    add("--token-budget", type=positive, default=budget, help="tokens of a step")
    add("--tensor-parallel", type=int, choices=(1, 2, 4, 6, 8), default=1, help="devices")
    add("--max-length", type=positive, default=4096, help="tokens per request; rounded up to pages")
    args = parser.parse_args(argv)
    if args.tensor_parallel > len(jax.devices()):
        parser.error(f"--tensor-parallel: there are {len(jax.devices())} devices")
    pages = -(-args.max_length // args.page_size)
    if pages > args.num_hbm_pages:
        parser.error(f"--num-hbm-pages: a request of --max-length needs {pages}")
    if args.token_budget <= args.max_requests:
        parser.error("--token-budget must exceed --max-requests")
    return args, Limits(args.page_size, args.max_requests, args.token_budget, pages)


def main(argv: Sequence[str] | None = None) -> None:
    args, limits = parse(argv)
    tokenizer: Tokenizer = ByteTokenizer()
    if args.model:
        tokenizer = QwenTokenizer(args.model)
        config, params = load_checkpoint(args.model, args.dtype)
    else:
        config = PRESETS[args.preset]
        params = init_params(config, 0, args.dtype)
    if (heads := config.num_key_value_heads) % args.tensor_parallel:
        raise SystemExit(f"--tensor-parallel: it must divide the {heads} KV heads of the model")
    memory = None
    if args.tensor_parallel > 1:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: args.tensor_parallel]), ("tp",))
        memory = jaxkv.SymmetricMemory.create(mesh, "tp")
    engine = Engine(config, params, limits, args.num_hbm_pages, args.num_host_pages, memory=memory)
    engine.warm_up(sampling=True)
    server = Server(engine, tokenizer, args.model.resolve().name if args.model else args.preset)
    uvicorn.run(
        server.app,
        host=args.host,
        port=args.port,
        timeout_graceful_shutdown=SHUTDOWN_WITHIN_S,
    )
    server.thread.stop()


if __name__ == "__main__":
    main()
