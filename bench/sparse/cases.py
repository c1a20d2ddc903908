"""Programs of bench/sparse/fetch.py: `calls` fetches one after the other, between two stamps."""

from __future__ import annotations

import ctypes
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import copy_baselines, timestamps
from bench.sparse.traces import Trace
from jaxkv import sparse

PAGE_SIZE = 64
WARMUP = 5
PRODUCTS = 8  # about 1.5 ms on a data-centre GPU
SOURCE = copy_baselines.REPOSITORY / "bench" / "sparse" / "published.cu"


class Cache:
    """A host pool of one layer, in which the first four bytes of a row are its number."""

    def __init__(self, row_bytes: int, nbytes: int):
        self.row_bytes = row_bytes
        self.num_pages = nbytes // (PAGE_SIZE * row_bytes)
        self.spec = jaxkv.KVCacheSpec(1, PAGE_SIZE, 1, row_bytes, np.uint8, kind="mla")
        self.pool = jaxkv.HostPool.create(self.spec, num_pages=self.num_pages)
        rows = np.zeros((self.num_pages * PAGE_SIZE, row_bytes // 4), np.int32)
        rows[:, 0] = np.arange(len(rows))
        data = jax.device_put(
            rows.view(np.uint8).reshape(self.pool.data.shape), self.pool.data.sharding
        )
        self.pool = jaxkv.HostPool(data, self.spec, self.pool.layout, self.pool.head_groups)

    def table(self, batch: int, context: int) -> np.ndarray:
        """Random pages; requests may share some, as with a common prefix."""
        shape = batch, context // PAGE_SIZE
        return np.random.default_rng(1).integers(0, self.num_pages, shape).astype(np.int32)


class Case:
    """Fetches of `k` ids of each of `batch` requests of `context` tokens."""

    def __init__(
        self,
        cache: Cache,
        *,
        batch: int,
        context: int,
        reuse: float,
        k: int,
        slots: int,
        calls: int,
    ):
        self.cache, self.batch, self.context, self.k = cache, batch, context, k
        self.slots, self.calls = slots, calls
        self.trace = Trace(batch=batch, context=context, k=k, reuse=reuse, calls=calls)
        self.table = cache.table(batch, context)
        self.missing_bytes = batch * self.trace.fresh * cache.row_bytes  # of a call

    def seconds(self, method: str) -> float:
        """Seconds per call of "jaxkv" or "published": of the GPU, or of the host without one."""
        program, state = getattr(self, f"_{method}")()
        for _ in range(WARMUP):  # until no slot is free
            state, _ = program(state, self.trace.next())
        timed, (state, rows) = timestamps.measure(
            lambda state: program(state[0], self.trace.next()), (state, None)
        )
        jaxkv.check_errors(rows)
        self._check(state[0], rows)
        return (timed.handlers if math.isnan(timed.gpu) else timed.gpu) / self.calls

    def _check(self, hot: jax.Array, rows: jax.Array) -> None:
        """Raises an AssertionError unless the last rows are those of the last ids."""
        found = np.asarray(hot.reshape(-1, self.cache.row_bytes)[rows.reshape(-1)])
        number = np.ascontiguousarray(found[:, :4]).view(np.int32).reshape(self.batch, self.k)
        ids = np.asarray(self.last_ids)
        pages = self.table[np.arange(self.batch)[:, None], ids // PAGE_SIZE]
        if not np.array_equal(number, pages * PAGE_SIZE + ids % PAGE_SIZE):
            raise AssertionError("fetched rows are wrong")

    def _chain(self, fetch: Any) -> Any:
        """`(state, rows) = program(state, ids, ...)` of a `rows, state = fetch(state, ids, ...)`.

        Products of matrices come first, so that the host is ahead of the GPU.
        """

        @functools.partial(jax.jit, donate_argnums=0)
        def chain(state: Any, ids: list[jax.Array], x: jax.Array, *arrays: Any) -> Any:
            for _ in range(PRODUCTS):
                x = x @ x
            first = timestamps.stamp(ids[0] + jnp.where(x[0, 0] > 1, 1, 0), 0)
            for call in (first, *ids[1:]):
                rows, state = fetch(state, call, *arrays)
            return state, timestamps.stamp(rows, 1)

        return chain

    def _jaxkv(self) -> tuple[Any, Any]:
        state = sparse.SparseState.create(
            self.cache.spec, batch=self.batch, slots=self.slots, max_length=self.context
        )
        arrays = [jnp.asarray(self.table), jnp.full(self.batch, self.context, jnp.int32)]

        def fetch(state: Any, ids: jax.Array, pool: Any, table: Any, lengths: Any) -> Any:
            rows, new = sparse.fetch(
                sparse.SparseState(*state), pool, ids, layer=0, lengths=lengths,
                block_table=table,
            )  # fmt: skip
            return rows, (new.hot, new.positions, new.used, new.slot_of, new.clock)

        chain = self._chain(fetch)
        leaves = (state.hot, state.positions, state.used, state.slot_of, state.clock)
        return self._recorded(lambda s, ids, x: chain(s, ids, x, self.cache.pool, *arrays)), leaves

    def _published(self) -> tuple[Any, Any]:
        library()
        tokens = np.arange(self.context)
        host_rows = jnp.asarray(
            self.table[:, tokens // PAGE_SIZE] * PAGE_SIZE + (tokens % PAGE_SIZE).astype(np.int32)
        )
        state = (
            jnp.zeros((self.batch, self.slots, self.cache.row_bytes), jnp.uint8),
            jnp.full((self.batch, self.slots), -1, jnp.int32),
            jnp.tile(jnp.arange(self.slots, dtype=jnp.int16), (self.batch, 1)),
        )

        def fetch(state: Any, ids: jax.Array, pool: Any, host_rows: Any) -> Any:
            call = jax.ffi.ffi_call(
                "bench_PublishedFetch",
                [jax.typeof(ids), *map(jax.typeof, state)],
                input_output_aliases={3: 1, 4: 2, 5: 3},
            )
            rows, *state = call(
                ids, host_rows, pool, *state,
                max_length=np.int64(self.context), row_bytes=np.int64(self.cache.row_bytes),
            )  # fmt: skip
            return rows, tuple(state)

        chain = self._chain(fetch)
        return self._recorded(
            lambda s, ids, x: chain(s, ids, x, self.cache.pool.data, host_rows)
        ), state

    def _recorded(self, program: Any) -> Any:
        size = 4096 if jax.default_backend() == "gpu" else 8
        x = jnp.full((size, size), 1 / size, jnp.bfloat16)

        def run(state: Any, ids: list[jax.Array]) -> Any:
            self.last_ids = ids[-1]
            return program(state, ids, x)

        return run


@functools.cache
def library() -> None:
    """Registers the kernel after the published design."""
    loaded = ctypes.CDLL(str(copy_baselines.compiled(SOURCE, cuda=True)))
    target = jax.ffi.pycapsule(loaded.PublishedFetch)
    jax.ffi.register_ffi_target("bench_PublishedFetch", target, platform="CUDA")


def read_back_seconds(case: Case) -> float:
    """Seconds of a fetch by cudaMemcpyBatchAsync: the ids are read back, misses are descriptors.

    Without the time of a look-up on the host, which would be added.
    """
    rows = case.cache.pool.data.reshape(-1, case.cache.row_bytes)
    hot = jnp.zeros((case.batch * case.slots, case.cache.row_bytes), jnp.uint8)
    ids = case.trace.next()[0]

    def read() -> float:
        fresh = jax.block_until_ready(ids + 0)
        start = time.perf_counter()
        np.asarray(fresh)
        return time.perf_counter() - start

    reading = float(np.median([read() for _ in range(5)]))
    number = case.batch * case.trace.fresh
    rng = np.random.default_rng(2)
    pairs = (
        rng.integers(0, rows.shape[0], number),
        rng.permutation(hot.shape[0])[:number],
    )
    if not number:
        return reading
    copied = copy_baselines.run(copy_baselines.BATCH, rows, hot, pairs, calls=1, repeats=3)
    return reading + copied.total
