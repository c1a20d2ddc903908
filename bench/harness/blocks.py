"""Copies of scattered blocks between two arrays, verified and then timed.

The timed unit is one jitted program with several copies, each with its own ids and dependent on the
previous one, as the layers of a step: this amortizes XLA's cost per execution as in a step. Calls
of the program follow each other in a chain with donation. The arrays are as large as an engine's.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import copy_baselines, timestamps, timing
from jaxkv._src.autotune.pools import Pools, verified
from jaxkv._src.explain import selections_of
from jaxkv._src.transfer.dispatch import force_implementation
from jaxkv._src.tuning import copy_table

DIRECTIONS = ("load", "store")
IMPLEMENTATIONS = {"cpu": ("host",), "gpu": ("kernel", "pallas", "dma")}
SM_IMPLEMENTATIONS = copy_table.ON_SMS
DEVICE_IDS, HOST_IDS = "device ids", "HostIds"
KIB = 1024


class Method(NamedTuple):
    """A copy method: an implementation of jaxkv, or a baseline inside JAX.

    Attributes:
      name: of the implementation or the baseline.
      ids: DEVICE_IDS or HOST_IDS; baselines have ids in pinned memory.
      num_sms: number of SMs, None for that of the table.
    """

    name: str
    ids: str = DEVICE_IDS
    num_sms: int | None = None

    @property
    def is_baseline(self) -> bool:
        return self.name in copy_baselines.CODES

    def __str__(self) -> str:
        return self.name if self.ids == DEVICE_IDS or self.name == "dma" else f"{self.name} HostIds"

    def sms_for(self, operation: Callable[..., Any], *args: Any) -> int:
        """Number of SMs of a call; 0 for the copy engine, the host and baselines.

        Raises:
          NotImplementedError: the implementation does not support the call.
        """
        if self.name not in copy_table.IMPLEMENTATIONS:
            return 0
        (choice,) = selections_of(operation, *args, implementation=self.name)
        on_sms = self.name in SM_IMPLEMENTATIONS
        return (self.num_sms or choice.num_sms) if on_sms else 0

    def taken(self, num_sms: int) -> contextlib.AbstractContextManager[None]:
        """Context in which jaxkv uses this method; no effect for baselines."""
        if self.name not in copy_table.IMPLEMENTATIONS:
            return contextlib.nullcontext()
        return force_implementation(self.name, num_sms)


def methods(platform: str) -> list[Method]:
    """All implementations with the ids that they take."""
    if platform == "cpu":
        return [Method("host"), Method("host", HOST_IDS)]
    return [Method("kernel"), Method("kernel", HOST_IDS), Method("pallas"), Method("dma", HOST_IDS)]


class Blocks:
    """Random blocks on either side of the link: `int32[num_blocks, words]`."""

    def __init__(self, pools: Pools, block_bytes: int):
        self.block_bytes, self._pools = block_bytes, pools
        self.arrays: dict[str, jax.Array] = {}
        self.fill()
        self.num_blocks = len(self.arrays["host"])

    def fill(self) -> None:
        """Creates missing arrays: at first both sides, later those consumed by a failed program."""
        if "host" not in self.arrays:
            self.arrays["host"] = self._pools.host(self.block_bytes)
        if "device" not in self.arrays:
            self.arrays["device"] = self._pools.device(self.block_bytes)

    def ids(self, method: Method, count: int, seed: int) -> tuple[tuple[Any, Any], Any]:
        """(source, destination) ids in the form of the method, and as NumPy arrays."""
        rng = np.random.default_rng(seed)
        plain = tuple(
            rng.choice(self.num_blocks, count, replace=False).astype(np.int32) for _ in range(2)
        )
        if method.ids == HOST_IDS:
            return tuple(map(jaxkv.HostIds, plain)), plain  # type: ignore[return-value]
        kind = "pinned_host" if method.is_baseline else "device"
        place = self.arrays["host"].sharding.with_memory_kind(kind)
        put = functools.partial(jax.device_put, device=place)
        # Baselines read them when the call is enqueued.
        return jax.block_until_ready(tuple(map(put, plain))), plain  # type: ignore[return-value]

    def sides(self, direction: str) -> tuple[jax.Array, jax.Array]:
        """Source and destination."""
        source, destination = names(direction)
        return self.arrays[source], self.arrays[destination]

    def chosen(self, direction: str, count: int, ids: str) -> Method:
        """The implementation that jaxkv chooses for ids of this form."""
        given, _ = self.ids(Method("", ids), count, 0)
        (choice,) = selections_of(jaxkv.swap_blocks, *self.sides(direction), *given)
        return Method(choice.implementation, ids)

    def program(
        self, method: Method, direction: str, count: int, copies: int, *, stamped: bool = True
    ) -> "Program":
        """A compiled and verified program, with or without stamps around its copies.

        Raises:
          NotImplementedError: the implementation does not support the call.
          AssertionError: wrong bytes.
        """
        made = [self.ids(method, count, seed) for seed in range(copies)]
        program = Program(self, method, direction, [ids for ids, _ in made], stamped)
        if made:
            program.verify([plain for _, plain in made])
        return program


class Program:
    """A jitted chain of copies, and its arrays.

    Attributes:
      num_sms: SMs per copy; 0 for the copy engine, the host and baselines.
      calls: length of a chain.
    """

    def __init__(
        self,
        blocks: Blocks,
        method: Method,
        direction: str,
        ids: list[tuple[Any, Any]],
        stamped: bool,
    ):
        self._blocks, self._method, self._ids, self.calls = blocks, method, ids, 1
        self._source, self._destination = names(direction)
        sides = blocks.sides(direction)
        pinned = copy_baselines.reads_pinned(sides[0])
        self.num_sms = method.sms_for(jaxkv.swap_blocks, *sides, *ids[0]) if ids else 0

        @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        def step(dst: jax.Array, src: jax.Array, ids: Any) -> jax.Array:
            dst = timestamps.stamp(dst, 0) if stamped else dst
            for pair in ids:
                dst = _copy(method.name, src, dst, *pair, pinned=pinned)
            return timestamps.stamp(dst, 1) if stamped else dst

        self._jitted = step

    def step(self, destination: jax.Array) -> jax.Array:
        return self._jitted(destination, self._blocks.arrays[self._source], self._ids)

    def verify(self, ids: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """The first run, which compiles."""
        source = self._blocks.arrays[self._source]
        self._advance(lambda destination: verified(self.step, source, destination, ids))

    def warm_up(self, seconds: float) -> None:
        """Sets the length of a chain to about this time, after the graphs are captured."""
        call = self.idle_calls(2)
        self.calls = max(1, min(timing.MAX_CALLS, int(seconds / call.done)))

    def chain(self) -> float:
        """Seconds per call in one chain."""
        run = functools.partial(
            timing.seconds_per_call, self.step, calls=self.calls, repeats=1, warmup=0
        )
        return float(self._advance(run))

    def measure(self) -> timestamps.Timed:
        """Times a program with stamps."""
        return self._advance(functools.partial(timestamps.measure, self.step))

    def idle_calls(self, repeats: int, after: Callable[[], None] = lambda: None) -> timing.Call:
        """Times single calls on an idle device."""
        run = functools.partial(timing.single_call, self.step, repeats=repeats, after=after)
        return self._advance(run)

    def _advance(self, run: Callable[[Any], Any]) -> Any:
        """Runs `destination -> destination` or `-> (figure, destination)`; returns the figure."""
        arrays = self._blocks.arrays
        with self._method.taken(self.num_sms):  # for all runs, as any may compile
            result = run(arrays.pop(self._destination))
        figure, array = result if isinstance(result, tuple) else (None, result)
        arrays[self._destination] = jax.block_until_ready(array)
        jaxkv.check_errors()
        return figure


def names(direction: str) -> tuple[str, str]:
    """Source and destination of a direction."""
    return ("host", "device") if direction == "load" else ("device", "host")


def _copy(
    name: str, src: jax.Array, dst: jax.Array, src_ids: Any, dst_ids: Any, *, pinned: bool
) -> jax.Array:
    if name in copy_baselines.CODES:
        return copy_baselines.copy(name, src, dst, src_ids, dst_ids, pinned=pinned)
    return jaxkv.swap_blocks(src, dst, src_ids, dst_ids)


@jax.jit
def equal(one: Any, other: Any) -> jax.Array:
    """Whether two pytrees have equal contents, as an array."""
    return jax.tree.reduce(jnp.logical_and, jax.tree.map(jnp.array_equal, one, other))


FACTORS = (2654435761, 40503, 2246822519, 3266489917, 668265263, 374761393)


@functools.partial(jax.jit, static_argnames="seed", donate_argnums=0)
def randomized(tree: Any, seed: int = 0) -> Any:
    """Pseudo-random small integers; copies of zeros can be faster than those of data."""

    def noise(x: jax.Array, number: int) -> jax.Array:
        mixed = jnp.full(x.shape, 97 * seed + number, jnp.uint32)
        for axis, factor in zip(range(x.ndim), FACTORS, strict=False):
            mixed += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(factor)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
        mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0x297A2D39)
        return ((mixed >> 24).astype(jnp.int32) - 128).astype(x.dtype)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [noise(x, number) for number, x in enumerate(leaves)])


UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


def size_text(nbytes: int) -> str:
    unit = next(unit for unit, size in UNITS.items() if nbytes % size == 0)
    return f"{nbytes // UNITS[unit]} {unit}"


def size_bytes(text: str) -> int:
    number, unit = text.split()
    return int(number) * UNITS[unit]
