"""The systems that the serving benchmarks compare: one engine, which moves pages differently.

in HBM         HBM pages for the whole working set
recompute      few HBM pages, no host tier; evicted pages are recomputed
device_put     offload as JAX engines do it today, in plain JAX (tpu-inference, sglang-jax; see
               bench.engines): a store gathers pages of all layers, then one
               `device_put` to pinned memory for each page; a load is one `device_put` for each
               page, one wait for all, and a scatter, all before the step
copy engine    jaxkv during the step, with one copy-engine descriptor for each block, as in vLLM's
               `swap_blocks_batch`: pages in descending order are not rows of one copy
jaxkv          jaxkv during the step, as the engine chooses: copy engine where blocks are large,
               otherwise as the tuning table ranks
host metadata  in HBM, with the metadata of each step in NumPy, one upload, and a wait for the
               tokens before the next step; the program still derives its metadata on the device, a
               few microseconds of GPU time more (only the scenario of bench.serving.decode)
"""

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import host_metadata
from examples.serving.block_manager import BlockManager
from examples.serving.engine import Dispatched, Engine, Limits
from examples.serving.model import Config, Params
from examples.serving.step import Inputs, jitted

IN_HBM, RECOMPUTE, DEVICE_PUT = "in HBM", "recompute", "device_put"
COPY_ENGINE, JAXKV = "copy engine", "jaxkv"
HOST_METADATA = "host metadata"
NAMES = (IN_HBM, RECOMPUTE, DEVICE_PUT, COPY_ENGINE, JAXKV)
COMPILERS = os.cpu_count() or 1  # threads
PAGES_AT_A_TIME = 64  # of a gather or scatter, as in the engines


class Memory(NamedTuple):
    """Numbers of pages: HBM for the whole working set, the HBM to use, and the host tier."""

    all: int
    hbm: int
    host: int


class Steps(NamedTuple):
    """Steps of an engine.

    Attributes:
      dispatched, to_idle: number; of them, those before which all earlier ones were over.
      seconds: host time without waits for the device.
      copied_pages: loaded and stored pages.
      extents: of these, maximal sequences that are consecutive both on the host and on the device.
    """

    dispatched: int
    to_idle: int
    seconds: float
    copied_pages: int = 0
    extents: int = 0


class Measured(Engine):
    """The engine, with the host time of its steps and the order of the pages it copies."""

    _steps = _idle_steps = _copied_pages = _extents = 0
    _seconds = _waited = 0.0
    _latest: Any = None

    def take_steps(self) -> Steps:
        """The steps since the last call."""
        taken = Steps(
            self._steps,
            self._idle_steps,
            self._seconds,
            self._copied_pages,
            self._extents,
        )
        self._steps = self._idle_steps = self._copied_pages = self._extents = 0
        self._seconds = 0.0
        return taken

    def step(self) -> None:
        start, waited = time.perf_counter(), self._waited
        super().step()
        self._seconds += time.perf_counter() - start - (self._waited - waited)

    def warm_up(self, sampling: bool = False) -> None:
        """Compiles all programs at once, by one thread each; then runs them."""
        with ThreadPoolExecutor(COMPILERS) as threads:
            list(threads.map(self._compile, self.padded_inputs()))
        super().warm_up(sampling)
        self.take_steps()

    def _compile(self, inputs: Inputs) -> None:
        jitted(inputs).lower(self._program, *self._arguments(inputs)).compile()

    def _inputs(self, rows: Any, copies: jaxkv.CopyBatch, num_tokens: int) -> Inputs:
        if copies.kind != "none":
            copies = self._ordered(copies)
            pages, extents = count_extents(copies)
            self._copied_pages += pages
            self._extents += extents
        return super()._inputs(rows, self._chosen(copies), num_tokens)

    def _ordered(self, copies: jaxkv.CopyBatch) -> jaxkv.CopyBatch:
        return copies

    def _chosen(self, copies: jaxkv.CopyBatch) -> jaxkv.CopyBatch:
        return copies

    def _finish(self, dispatched: Dispatched) -> None:
        start = time.perf_counter()
        with jaxkv.allow_host_sync("tokens of the step, timed"):
            jax.block_until_ready(dispatched[0])
        self._waited += time.perf_counter() - start
        super()._finish(dispatched)

    def _run(self, inputs: Inputs, sampling: bool) -> jax.Array:
        self._steps += 1
        self._idle_steps += self._latest is None or self._latest.is_ready()
        self._latest = super()._run(inputs, sampling)
        return self._latest

    def release(self) -> None:
        """Frees the memory of the pages."""
        jaxkv.check_errors(self.state, self.pool)
        if self.pool:
            self.pool.close()
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()


class CopyEngine(Measured):
    """Copies by the copy engine, with a descriptor for each block."""

    def _ordered(self, copies: jaxkv.CopyBatch) -> jaxkv.CopyBatch:
        host, device = copies.host_pages[::-1], copies.device_pages[::-1]
        return dataclasses.replace(copies, host_pages=host, device_pages=device)

    def _chosen(self, copies: jaxkv.CopyBatch) -> jaxkv.CopyBatch:
        return copies.by(_copy_engine())


class HostMetadata(Measured):
    def step(self) -> None:
        super().step()
        if self._previous:
            previous, self._previous = self._previous, None
            self._finish(previous)

    def _run(self, inputs: Inputs, sampling: bool) -> jax.Array:
        built = host_metadata.tokens(inputs.rows)
        self._built = host_metadata.uploaded(built | host_metadata.flashinfer(inputs.rows))
        return super()._run(inputs, sampling)


class DevicePut(Measured):
    """One `device_put` for each page, in plain JAX; pages are arrays [layers * 2, *page].

    A step waits for its copies, up to twice as many pages as in the other systems: fewer waits.
    """

    def __init__(
        self, config: Config, params: Params, limits: Limits, num_hbm: int, num_host: int, **options
    ):
        limits = dataclasses.replace(limits, copy_pages=2 * limits.copy_pages)
        super().__init__(config, params, limits, num_hbm, **options)
        self.host = jaxkv.OffloadEngine(num_host, batch_sizes=(limits.copy_pages,))
        self.blocks = BlockManager(num_hbm, self.host)
        device = jax.local_devices()[0]
        self._on_device = jax.sharding.SingleDeviceSharding(device)
        self._on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._stored: dict[int, jax.Array] = {}
        self._chunk = min(PAGES_AT_A_TIME, limits.copy_pages)
        if limits.copy_pages % self._chunk:
            raise ValueError(f"copy_pages={limits.copy_pages}: not a multiple of {self._chunk}")

    def padded_inputs(self) -> list[Inputs]:
        return [inputs for inputs in super().padded_inputs() if inputs.copies.kind == "none"]

    def _run(self, inputs: Inputs, sampling: bool) -> jax.Array:
        copies = inputs.copies
        host, on_device = copies.host_pages[copies.host_pages >= 0].tolist(), copies.device_pages
        if copies.kind == "store":
            for start in range(0, len(host), self._chunk):
                # Padding: any page.
                pages = np.maximum(on_device[start:][: self._chunk], 0)
                blocks = _gather(self.state.cache, pages)
                for page, block in zip(host[start:], blocks, strict=False):
                    self._stored[page] = jax.device_put(block, self._on_host)
        elif copies.kind == "load":
            begin = time.perf_counter()
            staged = [jax.device_put(self._stored[page], self._on_device) for page in host]
            with jaxkv.allow_host_sync("pages to load, as in the engines"):
                jax.block_until_ready(staged)
            self._waited += time.perf_counter() - begin
            staged += [staged[0]] * (-len(staged) % self._chunk)
            targets = np.where(on_device < 0, np.iinfo(np.int32).max, on_device)
            for start in range(0, len(host), self._chunk):
                blocks, pages = (x[start:][: self._chunk] for x in (staged, targets))
                cache = _scatter(self.state.cache, blocks, pages)
                self.state = self.state._replace(cache=cache)
        nothing = dataclasses.replace(copies, kind="none")
        return super()._run(inputs._replace(copies=nothing), sampling)

    def warm_up(self, sampling: bool = False) -> None:
        super().warm_up(sampling)
        # XLA keeps what is freed: stores do not wait for new pinned memory, as in a full host tier.
        size = (self.host.manager.num_pages, self.spec.page_bytes)
        jax.block_until_ready(jax.device_put(np.zeros(size, np.uint8), self._on_host))
        pages = np.zeros(self._chunk, np.int32)
        blocks = list(_gather(self.state.cache, pages))
        moved = [jax.device_put(block, self._on_host) for block in blocks]
        staged = [jax.device_put(block, self._on_device) for block in moved]
        nowhere = np.full_like(pages, np.iinfo(np.int32).max)
        self.state = self.state._replace(cache=_scatter(self.state.cache, staged, nowhere))
        jax.block_until_ready(self.state)

    def release(self) -> None:
        super().release()
        self._stored.clear()


def count_extents(copies: jaxkv.CopyBatch) -> tuple[int, int]:
    """The number of pages without padding, and of extents (`Steps`)."""
    pages = np.stack([copies.host_pages, copies.device_pages])
    pages = pages[:, pages[0] >= 0]
    count = pages.shape[1]
    return count, min(count, 1) + int((np.diff(pages) != 1).any(0).sum())


@jax.jit
def _gather(cache: jaxkv.DeviceCache, pages: jax.Array) -> list[jax.Array]:
    return list(jnp.stack([leaf[pages] for leaf in jax.tree.leaves(cache)], axis=1))


@partial(jax.jit, donate_argnums=0)
def _scatter(
    cache: jaxkv.DeviceCache, staged: list[jax.Array], pages: jax.Array
) -> jaxkv.DeviceCache:
    blocks = jnp.stack(staged)
    leaves, tree = jax.tree.flatten(cache)
    written = [leaf.at[pages].set(blocks[:, i], mode="drop") for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, written)


def create(name: str, config: Config, params: Params, limits: Limits, memory: Memory) -> Measured:
    """The engine of a system, compiled; `release` frees its memory."""
    kinds = {
        DEVICE_PUT: DevicePut, COPY_ENGINE: CopyEngine, HOST_METADATA: HostMetadata,
    }  # fmt: skip
    all_in_hbm = name in (IN_HBM, HOST_METADATA)
    num_hbm = memory.all if all_in_hbm else memory.hbm
    num_host = 0 if all_in_hbm or name == RECOMPUTE else memory.host
    engine = kinds.get(name, Measured)(config, params, limits, num_hbm, num_host)
    start = time.perf_counter()
    engine.warm_up()
    print(f"{name}: programs compiled in {time.perf_counter() - start:.1f} s", flush=True)
    return engine


def _copy_engine() -> Any:
    return "dma" if jax.default_backend() == "gpu" else "host"
