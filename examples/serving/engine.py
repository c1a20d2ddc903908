"""The serving loop in `Engine.step`: schedule, dispatch, read the tokens of the step before.

The host is one step ahead of the device. Sampled tokens stay there and are the next step's input;
the host reads them while the next step runs, so a stop token is noticed a step late and the token
after it is dropped. Prompt chunks and single tokens of answers share a batch, up to a token budget.

Scheduling is plain Python over integers, and the shapes of all programs are static, so nothing is
compiled while serving. A page is in use until the step that reads or writes it was dispatched, not
until it has ended: the device runs steps in order.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.metadata import BatchMetadata
from jaxkv.offload import BlockHasher, Tier

from . import attention as attention_module
from .block_manager import BlockManager, Placement
from .model import Config, Params, partition
from .packed import pack
from .request import Limits, Request
from .sampling import SamplingRows
from .step import Inputs, Program, State, copy_implementation, jitted

Row = tuple[Request, int]  # and its number of tokens in a step
# Tokens of a step that have not been read, and their requests and number of restarts; None: nothing
# was sampled.
Dispatched = tuple[jax.Array, list[tuple[Request, int] | None]]


class Engine:
    """Continuous batching over a DeviceCache and, unless `num_host_pages` is 0, a HostPool.

    Args:
      config, params: the model; the dtype of the cache is that of the parameters.
      limits: limits of the scheduler.
      num_hbm_pages, num_host_pages: sizes of both memories, without the null block, page 0.
      layout: layout of the host pool. By default consecutive pages are one descriptor of the copy
        engine; tiers read and write fewer, larger blocks in "page_first_direct".
      attention: implementation, see attention.py.
      memory: symmetric memory of a mesh axis "tp" for tensor parallelism.
      tiers: makes the tiers below the host pool, which remain the caller's.
      weights: names the weights; required with tiers, whose blocks outlive the engine.
    """

    def __init__(
        self, config: Config, params: Params, limits: Limits, num_hbm_pages: int,
        num_host_pages: int = 0, layout: Any = "layer_first", attention: str | None = None,
        memory: jaxkv.SymmetricMemory | None = None,
        tiers: Callable[[jaxkv.HostPool], Sequence[Tier]] = lambda pool: (), weights: str = "",
    ):  # fmt: skip
        if limits.pages_per_request > num_hbm_pages:
            need = f"a request may need pages_per_request={limits.pages_per_request}"
            raise ValueError(f"num_hbm_pages={num_hbm_pages}: {need}")
        self.config, self.limits, dtype = config, limits, params["norm"].dtype
        self.spec = config.cache_spec(limits.page_size, dtype)
        mesh, axis = (memory.mesh, "tp") if memory else (None, None)
        if mesh:
            specs = config.build(partition)
            params = jax.device_put(params, jax.tree.map(partial(jax.NamedSharding, mesh), specs))
        self.params, self._memory = params, memory
        where: Any = {"mesh": mesh, "head_axis": axis}
        cache = jaxkv.DeviceCache.create(self.spec, num_pages=num_hbm_pages + 1, **where)
        self._replicated = jax.NamedSharding(mesh, jax.P()) if mesh else cache.layers[0][0].sharding
        self.state = State(cache, jnp.zeros(limits.batch, jnp.int32, device=self._replicated))
        self.pool: jaxkv.HostPool | None = None
        if num_host_pages:
            where |= {"num_pages": num_host_pages, "layout": layout}
            self.pool = jaxkv.HostPool.create(self.spec, **where)
        below = tiers(self.pool) if self.pool else ()
        if below and not weights:
            raise ValueError("tiers need a name of the weights; otherwise others find their blocks")
        copies: Any = {"batch_sizes": [limits.copy_pages], "num_device_pages": num_hbm_pages + 1}
        self.host = jaxkv.OffloadEngine(self.pool or 0, tiers=below, **copies)
        self.blocks = BlockManager(num_hbm_pages, self.host)
        attention = attention_module.select(attention, dtype, config.head_dim)
        pool_sharding = self.pool.partition_spec if self.pool and memory else None
        self._program = Program(config, attention, memory, pool_sharding)
        block_bytes = self.spec.block_bytes // (memory.world_size if memory else 1)
        self._copy_implementation = copy_implementation(self.pool, cache, block_bytes)
        self._hasher = BlockHasher(limits.page_size, model=f"{weights} {config} {dtype}")
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(range(limits.batch))
        self._previous: Dispatched | None = None
        self._removed: list[tuple[Request, Placement, int]] = []  # with pages of loads in flight

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running or self._previous)

    def submit(self, request: Request) -> None:
        """Queues a request; ValueError as in `check`."""
        self.check(request)
        request.submitted_at = time.perf_counter()
        self._hasher.extend(request.keys, request.tokens)
        request.prefetch = self.host.prefetch(request.keys)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """ValueError: an empty prompt, or more tokens than `pages_per_request` pages hold."""
        size, limit = self.limits.page_size, self.limits.pages_per_request
        prompt, new = len(request.prompt), request.max_new_tokens
        if min(prompt, new) < 1 or prompt + new > size * limit:
            raise ValueError(
                f"request: {prompt} prompt tokens and {new} new ones; at least 1 each, and "
                f"{size * limit} in all (pages_per_request={limit} of {size} tokens)"
            )

    def step(self) -> None:
        """Dispatches a step and reads the tokens of the one before, the only host sync.

        JaxkvError, or an ExceptionGroup of them: a device rejected pages, or a wait timed out. The
        tokens, and blocks stored since, may be wrong: the engine must not be used any more.
        """
        with jaxkv.forbid_host_sync():
            self._compute_anew(self.blocks.poll())
            self._admit()
            copies = self.blocks.next_batch()
            rows, previous = self._schedule(), self._previous
            self._previous = self._dispatch(rows, copies) if rows or copies.copies else None
            if previous:
                self._finish(previous)
            elif not self._previous:  # waiting for a tier, whose threads need the interpreter
                time.sleep(1e-3)

    def cancel(self, request: Request) -> None:
        """Ends a request, for example when its client is gone."""
        if not request.finished:
            self._remove(request)
            request.finished = True

    def _compute_anew(self, failed: set[int]) -> None:
        """Preempts requests with pages of failed loads.

        Blocks computed from these pages, also by requests that have ended, are not found any more.
        """
        running = [(r, r.placement, r.published) for r in self.running[::-1] if r.placement]
        for request, placement, published in [*running, *self._removed] if failed else ():
            if failed.isdisjoint(placement.pages):
                continue
            # Blocks that were loaded may have been stored again from the wrong pages.
            self.blocks.forget(placement.pages, request.keys)
            self.host.discard(request.keys[placement.found_in_hbm : published])
            if request.placement is placement:
                request.restarts, request.in_flight = request.restarts + 1, 0
                self._preempt(request)
        self._removed = [r for r in self._removed if self.blocks.has_load_in_flight(r[1].pages)]

    def _admit(self) -> None:
        """Starts waiting requests, in order, while there are rows, and pages for their tokens.

        Requests whose blocks are being read from a tier are passed over.
        """
        place, size = 0, self.limits.page_size
        while place < len(self.waiting) and self._slots:
            request = self.waiting[place]
            if request.prefetch and not request.prefetch.done:
                place += 1
                continue
            if request.in_flight:  # its last token is not known
                return
            # The last token is always computed, to obtain the next logits.
            keys = request.keys[: (len(request.tokens) - 1) // size]
            if not (placement := self.blocks.admit(keys, -(-len(request.tokens) // size))):
                return
            del self.waiting[place]
            self.running.append(request)
            request.slot, request.placement = self._slots.pop(), placement
            request.published = placement.found_in_hbm + placement.loaded
            request.computed = request.published * size
            request.first_placement = request.first_placement or placement
            request.admitted_at = request.admitted_at or time.perf_counter()

    def _schedule(self) -> list[Row]:
        """Requests of the next step and their numbers of tokens: answers first, then prompts."""
        rows: list[Row] = []
        budget = self.limits.token_budget
        for request in sorted(self.running, key=lambda request: request.missing > 1):
            if request.placement and request.ready and budget and self._ensure_page(request):
                rows.append((request, min(request.missing, budget)))
                budget -= rows[-1][1]
        # A later request may have been preempted for an earlier one.
        return [row for row in rows if row[0].placement]

    def _ensure_page(self, request: Request) -> bool:
        """Allocates the page of the next token; preempts the latest requests if there is none."""
        assert request.placement
        size, placement = self.limits.page_size, request.placement
        while request.computed >= len(placement.pages) * size and not self.blocks.grow(placement):
            victim = self.running[-1]
            if victim is not request or len(self.running) > 1:
                self._preempt(victim)
            if victim is request:  # its own pages may be in use by stores, or by no one else
                return False
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
        if self.blocks.has_load_in_flight(request.placement.pages):
            self._removed.append((request, request.placement, request.published))
        self.running.remove(request)
        self.blocks.release(request.placement.pages)
        self._slots.append(request.slot)
        request.placement = None

    def _dispatch(self, rows: Sequence[Row], copies: jaxkv.CopyBatch) -> Dispatched:
        """Dispatches a step and records what it computes."""
        total = sum(count for _, count in rows)
        sizes = self.limits.token_sizes if total > len(rows) else [self.limits.batch]
        sampled = [(r, r.restarts) if r.missing == count else None for r, count in rows]
        try:
            inputs = self._inputs(rows, copies, next(size for size in sizes if size >= total))
            chosen = self._run(inputs, any(request.sampling.temperature > 0 for request, _ in rows))
        except Exception:
            self.host.abandon(copies)
            raise
        self.host.issue(copies, chosen)
        for request, count in rows:
            request.computed += count
            request.in_flight += request.missing == 0
            self._publish(request)
        return chosen, sampled

    def _inputs(self, rows: Sequence[Row], copies: jaxkv.CopyBatch, num_tokens: int) -> Inputs:
        """The arrays of a step, padded to `num_tokens`."""
        num_rows = self.limits.batch
        # Kernels take SMs from the step. But a decode step is shorter than the host needs to write
        # the copy engine's descriptors of a prefix.
        by_kernel = copies.kind == "load" and num_tokens == num_rows
        chosen = None if by_kernel else self._copy_implementation
        copies = copies.by(chosen, sharding=self._replicated)
        tokens, source = np.zeros(num_tokens, np.int32), np.full(num_tokens, -1, np.int32)
        slots = np.full(num_rows, num_rows, np.int32)  # out of range
        start = 0
        for row, (request, count) in enumerate(rows):
            new = request.tokens[request.computed :][:count]
            tokens[start : start + len(new)] = new
            if len(new) < count:  # sampled by the previous step
                source[start] = request.slot
            if request.missing == count:
                slots[row] = request.slot
            start += count
        batch = BatchMetadata.from_host(
            [count for _, count in rows],
            [request.computed + count for request, count in rows],
            [request.placement.pages for request, _ in rows if request.placement],
            max_num_reqs=num_rows, max_num_tokens=num_tokens,
            max_blocks=self.limits.pages_per_request, block_size=self.limits.page_size,
        )  # fmt: skip
        sampling = SamplingRows.of([request.sampling for request, _ in rows], num_rows)
        return Inputs(tokens, source, batch, slots, sampling, copies)

    def _arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        """Arguments of the compiled function, after the program.

        Without copies they do not contain the pool, so that engines with different pools share
        these programs.
        """
        pool = None if inputs.copies.kind == "none" else self.pool
        return self.params, self.state, pool, pack(inputs)

    def _run(self, inputs: Inputs, sampling: bool) -> jax.Array:
        run, program = jitted(inputs), self._program._replace(sampling=sampling)
        self.state, chosen, stored = run(program, *self._arguments(inputs))
        self.pool = stored or self.pool
        chosen.copy_to_host_async()
        return chosen

    def _finish(self, dispatched: Dispatched) -> None:
        """Reads the tokens of a step; then raises the first exception of a request's callbacks."""
        with jaxkv.allow_host_sync("tokens of the previous step, while this one runs"):
            tokens = np.asarray(dispatched[0]).tolist()
        # On GPUs a step with errors ends like any other. Before `poll`, which ends its stores.
        jaxkv.check_errors()
        if self._memory:
            self._memory.check_errors()
        self._compute_anew(self.blocks.poll())  # the loads of the step have ended, too
        errors = []
        for sampled, token in zip(dispatched[1], tokens, strict=False):
            if sampled and sampled[0].restarts == sampled[1]:
                try:
                    self._append(sampled[0], token)
                except Exception as error:  # the other requests go on
                    self.cancel(sampled[0])
                    errors.append(error)
        if errors:
            raise errors[0]

    def _append(self, request: Request, token: int) -> None:
        if request.finished:  # sampled after the stop token
            return
        request.in_flight -= 1
        request.tokens.append(token)
        request.token_times.append(time.perf_counter())
        self._hasher.extend(request.keys, request.tokens)
        self._publish(request)
        length = len(request.tokens) - len(request.prompt)
        if length == request.max_new_tokens or request.stop(request):
            self.cancel(request)
        request.on_token(request)

    def _publish(self, request: Request) -> None:
        """Publishes pages that are full and whose tokens are known, and stores them."""
        full = min(request.computed // self.limits.page_size, len(request.keys))
        if request.placement and full > request.published:
            pages, keys = request.placement.pages, request.keys[:full]
            request.stored += self.blocks.publish(pages, keys, request.published)
            request.published = full

    def padded_inputs(self) -> list[Inputs]:
        """Inputs of all programs, without requests."""
        sizes = [self.limits.batch, *self.limits.token_sizes]
        return [self._inputs([], c, size) for c in self.host.padding_batches() for size in sizes]

    def warm_up(self, sampling: bool = False) -> None:
        """Compiles all programs by running them on padding; call it before the first request.

        Calls `gc.freeze`, which concerns all objects of the process.
        """
        for inputs in self.padded_inputs():
            for kind in (False, True)[: 1 + sampling]:
                self._run(inputs, kind)
        jax.block_until_ready(self.state)
        # A full collection that visits all that exists by now would stall the loop for 0.1 s.
        gc.collect()
        gc.freeze()
