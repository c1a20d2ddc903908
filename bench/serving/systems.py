"""The systems that the serving benchmarks compare: one engine, which moves pages differently.

in HBM         HBM pages for the whole working set
recompute      few HBM pages, no host tier; evicted pages are computed again
device_put     offload as JAX engines do it today, in plain JAX (tpu-inference, sglang-jax; see
               bench.engines): a store gathers pages of all layers, then one
               `device_put` to pinned memory for each page; a load is one `device_put` for each
               page, one wait for all, and a scatter, all before the step
copy engine    jaxkv with one copy-engine descriptor for each block, beside the step
jaxkv          jaxkv with the implementation that its tuning table chooses, beside the step
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from examples.serving import step
from examples.serving.block_manager import BlockManager
from examples.serving.engine import Engine, Limits
from examples.serving.model import Config, Params
from examples.serving.step import Inputs, Program

IN_HBM, RECOMPUTE, DEVICE_PUT = "in HBM", "recompute", "device_put"
COPY_ENGINE, JAXKV = "copy engine", "jaxkv"
COMPILERS = 8  # threads
PAGES_AT_A_TIME = 64  # of a gather or scatter, as in the engines
NAMES = (IN_HBM, RECOMPUTE, DEVICE_PUT, COPY_ENGINE, JAXKV)


class Memory(NamedTuple):
    """Numbers of pages: HBM for the whole working set, the HBM to use, and the host tier."""

    all: int
    hbm: int
    host: int


class Measured(Engine):
    """The engine with its host time, and the steps that were dispatched to an idle device.

    Attributes:
      steps, idle_steps: dispatched steps; those before which all earlier ones were over.
      seconds: host time of steps without waits for the device.
    """

    steps = idle_steps = 0
    seconds = waited = 0.0
    _latest: Any = None
    _to_compile: list[tuple[Inputs, str, bool]] | None = None

    def reset(self) -> None:
        self.steps = self.idle_steps = 0
        self.seconds = self.waited = 0.0

    def step(self) -> None:
        start, waited = time.perf_counter(), self.waited
        super().step()
        self.seconds += time.perf_counter() - start - (self.waited - waited)

    def warm_up(self, sampling: bool = False) -> None:
        """Compiles all programs at once, by one thread each; then runs them."""
        self._to_compile = []
        super().warm_up(sampling)
        calls, self._to_compile = self._to_compile, None
        with ThreadPoolExecutor(COMPILERS) as threads:
            list(threads.map(self._compile, calls))
        super().warm_up(sampling)

    def _compile(self, call: tuple[Inputs, str, bool]) -> None:
        inputs, copy, sampling = call
        program = Program(copy=copy, sampling=sampling, **self._program)
        pool = None if copy == "none" else self.pool
        jitted: Any = step._run_store if copy == "store" else step._run
        jitted.lower(program, self.params, self.state, pool, inputs).compile()

    def _read(self, tokens: jax.Array) -> list[int]:
        start = time.perf_counter()
        jax.block_until_ready(tokens)
        self.waited += time.perf_counter() - start
        return super()._read(tokens)

    def _run(self, inputs: Inputs, copy: str, sampling: bool) -> jax.Array:
        if self._to_compile is not None:
            self._to_compile.append((inputs, copy, sampling))
            return self.state.last
        self.steps += 1
        self.idle_steps += self._latest is None or self._latest.is_ready()
        self._latest = super()._run(inputs, copy, sampling)
        return self._latest


class CopyEngine(Measured):
    """Copies by `implementation="dma"`, whose ids the host writes."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        on_gpu = jax.default_backend() == "gpu"
        self._program["implementation"] = "dma" if on_gpu else "host"

    def _run(self, inputs: Inputs, copy: str, sampling: bool) -> jax.Array:
        if copy != "none":
            ids: Any = tuple(map(jaxkv.HostIds, inputs.copies))
            inputs = inputs._replace(copies=ids)
        return super()._run(inputs, copy, sampling)


class DevicePut(Measured):
    """One `device_put` for each page, in plain JAX; pages are arrays [layers * 2, *page]."""

    def __init__(
        self, config: Config, params: Params, limits: Limits, num_hbm: int, num_host: int, **options
    ):
        super().__init__(config, params, limits, num_hbm, **options)
        self.blocks = BlockManager(num_hbm, num_host, limits.copy_pages)
        device = jax.local_devices()[0]
        self._on_device = jax.sharding.SingleDeviceSharding(device)
        self._on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._stored: dict[int, jax.Array] = {}
        self._num_host = num_host
        self._chunk = min(PAGES_AT_A_TIME, limits.copy_pages)
        if limits.copy_pages % self._chunk:
            raise ValueError(f"copy_pages={limits.copy_pages}: not a multiple of {self._chunk}")

    def _run(self, inputs: Inputs, copy: str, sampling: bool) -> jax.Array:
        host, on_device = np.asarray(inputs.copies)
        host = host[host >= 0]
        if copy == "store":
            for start in range(0, len(host), self._chunk):
                # Padding: any page.
                pages = np.maximum(on_device[start:][: self._chunk], 0)
                blocks = _gather(self.state.cache, pages)
                for page, block in zip(host[start:].tolist(), blocks, strict=False):
                    self._stored[page] = jax.device_put(block, self._on_host)
        elif copy == "load":
            begin = time.perf_counter()
            staged = [jax.device_put(self._stored[page], self._on_device) for page in host.tolist()]
            with jaxkv.allow_host_sync("pages to load, as in the engines"):
                jax.block_until_ready(staged)
            self.waited += time.perf_counter() - begin
            staged += [staged[0]] * (-len(staged) % self._chunk)
            targets = np.where(on_device < 0, np.iinfo(np.int32).max, on_device)
            for start in range(0, len(host), self._chunk):
                blocks, pages = (x[start:][: self._chunk] for x in (staged, targets))
                cache = _scatter(self.state.cache, blocks, pages)
                self.state = self.state._replace(cache=cache)
        return super()._run(inputs, "none", sampling)

    def warm_up(self, sampling: bool = False) -> None:
        super().warm_up(sampling)
        # XLA keeps what is freed: stores do not wait for new pinned memory, as in a full host tier.
        size = (self._num_host, self.spec.page_bytes)
        jax.block_until_ready(jax.device_put(np.zeros(size, np.uint8), self._on_host))
        pages = np.zeros(self._chunk, np.int32)
        blocks = list(_gather(self.state.cache, pages))
        moved = [jax.device_put(block, self._on_host) for block in blocks]
        staged = [jax.device_put(block, self._on_device) for block in moved]
        nowhere = np.full_like(pages, np.iinfo(np.int32).max)
        self.state = self.state._replace(cache=_scatter(self.state.cache, staged, nowhere))
        jax.block_until_ready(self.state)


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


def create(
    name: str, config: Config, params: Params, limits: Limits, memory: Memory, **options: Any
) -> Measured:
    """The engine of a system, compiled; `close` it before the next one."""
    kind = {DEVICE_PUT: DevicePut, COPY_ENGINE: CopyEngine}.get(name, Measured)
    num_hbm = memory.all if name == IN_HBM else memory.hbm
    num_host = 0 if name in (IN_HBM, RECOMPUTE) else memory.host
    engine = kind(config, params, limits, num_hbm, num_host, **options)
    start = time.perf_counter()
    engine.warm_up()
    print(f"{name}: programs compiled in {time.perf_counter() - start:.1f} s", flush=True)
    engine.reset()
    return engine


def close(engine: Measured) -> None:
    """Frees the memory of an engine's pages."""
    jaxkv.check_errors(engine.state, engine.pool)
    if engine.pool:
        engine.pool.close()
    for leaf in jax.tree.leaves(engine.state):
        leaf.delete()
    engine.pool = None
    if isinstance(engine, DevicePut):
        engine._stored.clear()
