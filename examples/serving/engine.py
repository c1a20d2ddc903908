"""The serving loop in `Engine.step`: schedule, dispatch, read the tokens of the step before.

The host is one step ahead of the device. Sampled tokens stay there and are the next step's input;
the host reads them while the next step runs, so a stop token is noticed a step late and the token
after it is dropped. Prompt chunks and single tokens of answers share a batch, up to a token budget.

Scheduling is plain Python over integers, and the shapes of all programs are static, so nothing is
compiled while serving. A page is in use until the step that reads or writes it was dispatched, not
until it is over: the device runs steps in order.

With float32 products, answers do not depend on where the pages of a prefix come from: batches may
differ, but the error is far below the margin between the two best tokens. In bfloat16 tokens are
equal only where batches are.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.metadata import BatchMetadata
from jaxkv.offload import BlockHasher, FileTier

from . import attention as attention_module
from .block_manager import BlockManager
from .model import Config, Params, partition
from .request import Limits, Request
from .sampling import SamplingRows
from .step import Inputs, Program, State, run
from .tokenizer import Tokenizer

TIER_BYTES = 1 << 36  # of files

Row = tuple[Request, int]  # and its number of tokens in a step


class Dispatched(NamedTuple):
    """A step whose tokens have not been read."""

    tokens: jax.Array
    rows: list[Request | None]  # None: nothing was sampled for the row


class Engine:
    """Continuous batching over a DeviceCache and, unless `num_host_pages` is 0, a HostPool.

    Args:
      config, params: the model; the dtype of the cache is that of the parameters.
      limits: of the scheduler.
      num_hbm_pages, num_host_pages: sizes of both memories.
      layout: of the host pool.
      attention: implementation, see attention.py.
      memory: symmetric memory of a mesh axis "tp" for tensor parallelism.
      write: when pages are stored, see `jaxkv.offload.OffloadManager`.
      tier: directory of a tier of files below the host pool.
      weights: names the weights, if other ones may use the same tier.
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        limits: Limits,
        num_hbm_pages: int,
        num_host_pages: int = 0,
        layout: Any = "page_first_direct",
        attention: str | None = None,
        memory: jaxkv.SymmetricMemory | None = None,
        write: str = "through",
        tier: Path | None = None,
        weights: str = "",
    ):
        if limits.pages_per_request > num_hbm_pages:
            raise ValueError(
                f"num_hbm_pages={num_hbm_pages}: a request may need "
                f"pages_per_request={limits.pages_per_request}"
            )
        self.config, self.limits, dtype = config, limits, params["norm"].dtype
        self.spec = jaxkv.KVCacheSpec(
            num_layers=config.num_hidden_layers,
            page_size=limits.page_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )
        mesh, axis = (memory.mesh, "tp") if memory else (None, None)
        if mesh:
            specs = config.build(partition)
            params = jax.device_put(params, jax.tree.map(partial(jax.NamedSharding, mesh), specs))
        self.params = params
        cache = jaxkv.DeviceCache.create(
            self.spec, num_pages=num_hbm_pages, mesh=mesh, head_axis=axis
        )
        sharding = jax.NamedSharding(mesh, jax.P()) if mesh else cache.layers[0][0].sharding
        self.state = State(cache, jnp.zeros(limits.batch, jnp.int32, device=sharding))
        self.pool: jaxkv.HostPool | None = None
        if num_host_pages:
            self.pool = jaxkv.HostPool.create(
                self.spec, num_pages=num_host_pages, layout=layout, mesh=mesh, head_axis=axis
            )
        self.attention = attention_module.select(attention, dtype, config.head_dim)
        self._program: dict[str, Any] = dict(config=config, attention=self.attention, memory=memory)
        if self.pool and memory:
            self._program["pool"] = self.pool.partition_spec
        self._tiers: list[FileTier] = []
        if tier and self.pool:
            size = jaxkv.OffloadEngine.tier_block_bytes(self.pool)
            self._tiers.append(FileTier(tier, size, capacity_bytes=TIER_BYTES))
        host = self.pool or 0
        self.blocks = BlockManager(num_hbm_pages, host, limits.copy_pages, write, self._tiers)
        self._hasher = BlockHasher(limits.page_size, model=f"{weights} {config} {dtype}")
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(range(limits.batch))
        self._previous: Dispatched | None = None

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running or self._previous)

    def submit(self, request: Request) -> None:
        """Queues a request; ValueError as in `check`."""
        self.check(request)
        request.submitted_at = time.perf_counter()
        self._extend_keys(request)
        request.prefetch = self.blocks.prefetch(request.keys)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """ValueError: an empty prompt, or more tokens than `pages_per_request` pages hold."""
        size, limit = self.limits.page_size, self.limits.pages_per_request
        length = len(request.prompt) + request.max_new_tokens
        if not request.prompt or request.max_new_tokens < 1 or length > size * limit:
            raise ValueError(
                f"request {request.name}: {len(request.prompt)} prompt tokens and "
                f"{request.max_new_tokens} new ones; at least 1 each, and {size * limit} in all "
                f"(pages_per_request={limit} of {size} tokens)"
            )

    def step(self) -> None:
        """Dispatches a step and reads the tokens of the one before, the only host sync."""
        with jaxkv.forbid_host_sync():
            self.blocks.poll()
            self._admit()
            copies = self.blocks.next_batch()
            rows = self._schedule()
            previous, self._previous = self._previous, None
            if rows or copies:
                self._previous = self._dispatch(rows, copies)
            if previous:
                self._finish(previous)
            elif not self._previous:  # waiting for a tier, whose threads need the interpreter
                time.sleep(1e-3)

    def cancel(self, request: Request) -> None:
        """Ends a request, for example when its client is gone."""
        if not request.finished:
            self._remove(request)
            request.finished = True

    def _admit(self) -> None:
        """Starts waiting requests, in order, while there are rows, and pages for their tokens."""
        while self.waiting and self._slots:
            request, size = self.waiting[0], self.limits.page_size
            if request.prefetch and not request.prefetch.done:
                return
            tokens = request.tokens
            self._extend_keys(request)
            # The last token is always computed, to obtain the next logits.
            keys = request.keys[: (len(tokens) - 1) // size]
            placement = self.blocks.admit(keys, -(-len(tokens) // size))
            if placement is None:
                return
            self.running.append(self.waiting.popleft())
            request.slot, request.placement = self._slots.pop(), placement
            request.published = placement.found_in_hbm + placement.loaded
            request.computed = request.published * size
            request.first_placement = request.first_placement or placement
            request.admitted_at = request.admitted_at or time.perf_counter()

    def _schedule(self) -> list[Row]:
        """Requests of the next step and their numbers of tokens: answers first, then prompts."""
        rows: list[Row] = []
        for request in [r for r in self.running if r.missing == 1]:
            if request.placement and request.ready and self._ensure_page(request):
                rows.append((request, 1))
        # A later request may have been preempted for an earlier one.
        rows = [row for row in rows if row[0].placement]
        budget = self.limits.token_budget - len(rows)
        for request in self.running:
            if request.missing > 1 and request.ready and budget > 0:
                rows.append((request, min(request.missing, budget)))
                budget -= rows[-1][1]
        return rows

    def _ensure_page(self, request: Request) -> bool:
        """Allocates the page of the next token; preempts the latest requests if there is none."""
        assert request.placement
        while request.computed >= len(request.placement.pages) * self.limits.page_size:
            if self.blocks.grow(request.placement):
                return True
            victim = self.running[-1]
            if victim is request:  # its own pages may be in use by stores, or by no one else
                if len(self.running) > 1:
                    self._preempt(victim)
                return False
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        """Its pages are released and recomputed, or loaded, when it is admitted again."""
        self._remove(request)
        request.computed = request.published = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _remove(self, request: Request) -> None:
        if request.placement is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.blocks.release(request.placement.pages)
        self._slots.append(request.slot)
        request.placement = None

    def _dispatch(self, rows: Sequence[Row], copies: jaxkv.CopyBatch | None) -> Dispatched:
        """Dispatches a step and does the account of what it computes."""
        total = sum(count for _, count in rows)
        if total > len(rows):
            num_rows = self.limits.batch
            num_tokens = next(size for size in self.limits.token_sizes if size >= total)
        else:
            num_rows = num_tokens = next(s for s in self.limits.row_sizes if s >= len(rows))
        inputs = self._inputs(rows, copies, num_rows, num_tokens)
        sampled = [request if request.missing == count else None for request, count in rows]
        sampling = any(request.sampling.temperature > 0 for request, _ in rows)
        chosen = self._run(inputs, copies.kind if copies else "none", sampling)
        if copies:
            self.blocks.issue(copies, chosen)
        for request, count in rows:
            request.computed += count
            request.in_flight += request.missing == 0
            self._publish(request)
        return Dispatched(chosen, sampled)

    def _inputs(
        self, rows: Sequence[Row], copies: jaxkv.CopyBatch | None, num_rows: int, num_tokens: int
    ) -> Inputs:
        """The arrays of a step, padded to `num_rows` and `num_tokens`."""
        limits = self.limits
        tokens, source = np.zeros(num_tokens, np.int32), np.full(num_tokens, -1, np.int32)
        slots = np.full(num_rows, limits.batch, np.int32)
        start = 0
        for row, (request, count) in enumerate(rows):
            new = request.tokens[request.computed :][:count]
            tokens[start : start + len(new)] = new
            if len(new) < count:  # sampled by the previous step
                source[start] = request.slot
            if request.missing == count:
                slots[row] = request.slot
            start += count
        pages = np.full((2, limits.copy_pages), -1, np.int32)
        if copies:
            pages[:] = copies.host_pages, copies.device_pages
        batch = BatchMetadata.from_host(
            [count for _, count in rows],
            [request.computed + count for request, count in rows],
            [request.placement.pages for request, _ in rows if request.placement],
            max_num_reqs=num_rows,
            max_num_tokens=num_tokens,
            max_blocks=limits.pages_per_request,
            block_size=limits.page_size,
        )
        sampling = SamplingRows.of([request.sampling for request, _ in rows], num_rows)
        return Inputs(tokens, source, batch, slots, sampling, pages)

    def _finish(self, dispatched: Dispatched) -> None:
        """Reads the tokens of a step."""
        with jaxkv.allow_host_sync("tokens of the previous step, while this one runs"):
            tokens = self._read(dispatched.tokens)
        for request, token in zip(dispatched.rows, tokens, strict=False):
            if request:
                self._append(request, token)

    def _read(self, tokens: jax.Array) -> list[int]:
        return list(np.asarray(tokens).tolist())

    def _run(self, inputs: Inputs, copy: str, sampling: bool) -> jax.Array:
        program = Program(copy=copy, sampling=sampling, **self._program)
        self.state, chosen, self.pool = run(program, self.params, self.state, self.pool, inputs)
        chosen.copy_to_host_async()
        return chosen

    def _append(self, request: Request, token: int) -> None:
        if request.finished:  # sampled after the stop token
            return
        request.in_flight = 0
        request.tokens.append(token)
        request.token_times.append(time.perf_counter())
        if request.placement:
            self._publish(request)
        length = len(request.tokens) - len(request.prompt)
        if length == request.max_new_tokens or request.stop(request):
            self.cancel(request)
        request.on_token(request)

    def _extend_keys(self, request: Request) -> None:
        start, size = len(request.keys) * self.limits.page_size, self.limits.page_size
        if len(request.tokens) >= start + size:
            parent = request.keys[-1] if request.keys else None
            request.keys += self._hasher.hashes(request.tokens[start:], parent)

    def _publish(self, request: Request) -> None:
        """Publishes pages that are full and whose tokens are known, and stores them."""
        full = min(request.computed, len(request.tokens)) // self.limits.page_size
        if request.placement and full > request.published:
            self._extend_keys(request)
            request.stored += self.blocks.publish(
                request.placement.pages, request.keys[:full], request.published
            )
            request.published = full

    def warm_up(self, sampling: bool = False) -> None:
        """Compiles all programs by running them on padding; call it before the first request."""
        sizes = [(rows, rows) for rows in self.limits.row_sizes]
        sizes += [(self.limits.batch, tokens) for tokens in self.limits.token_sizes]
        for copy in ("none", "load", "store") if self.pool else ("none",):
            for num_rows, num_tokens in sizes:
                for kind in (False, True)[: 1 + sampling]:
                    self._run(self._inputs([], None, num_rows, num_tokens), copy, kind)
        jax.block_until_ready(self.state)

    def close(self) -> None:
        """Ends the tier, once it has what was stored; call it when no request is left."""
        self.blocks.poll()
        if self.blocks.host:
            self.blocks.host.drain()
        for tier in self._tiers:
            tier.close()


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    conversations: Mapping[str, Sequence[str]],
    max_new_tokens: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Request]:
    """Serves all first turns, then all second ones, and so on; reports progress after each step.

    By the next turn of a conversation, its pages have been evicted from HBM by the others.
    """
    served: list[Request] = []
    latest: dict[str, Request] = {}
    for index in range(max(map(len, conversations.values()))):
        for name, turns in conversations.items():
            if index < len(turns):
                before = latest.get(name)
                history = before.tokens if before else []
                latest[name] = Request(
                    history + tokenizer.prompt(turns[index], history),
                    max_new_tokens,
                    stop=lambda request: request.tokens[-1] == tokenizer.stop,
                    name=name,
                    index=index,
                    known=before.computed if before else 0,
                )
                engine.submit(latest[name])
                served.append(latest[name])
        while engine.busy:
            engine.step()
            left = len(engine.waiting) + len(engine.running)
            progress(f"turn {index + 1}, {left} conversations left")
        jaxkv.check_errors(engine.state, engine.pool)
    return served
