"""Copies between host and device memory, verified and then timed.

Blocks are copied between two arrays as large as an engine's. There the timed unit is one jitted
program with several copies, each with its own ids and dependent on the previous one, as the layers
of a step: this amortizes XLA's cost per execution as in a step.
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
SM_IMPLEMENTATIONS = copy_table.ON_SMS
DEVICE_IDS, HOST_IDS = "device ids", "HostIds"
CHOSEN = "as chosen"
KIB = 1024


class Method(NamedTuple):
    """A copy method: an implementation of jaxkv, its own choice, or a baseline inside JAX.

    Attributes:
      name: of the implementation or the baseline, or CHOSEN.
      ids: DEVICE_IDS or HOST_IDS; baselines have ids in pinned memory.
      num_sms: number of SMs, None for that of the table.
    """

    name: str
    ids: str = DEVICE_IDS
    num_sms: int | None = None

    def __str__(self) -> str:
        return self.name if self.ids == DEVICE_IDS or self.name == "dma" else f"{self.name} HostIds"

    @property
    def is_baseline(self) -> bool:
        return self.name in copy_baselines.CODES

    @property
    def implementation(self) -> Any:
        """The option of jaxkv's functions."""
        return None if self.name == CHOSEN else self.name

    def converted(self, ids: np.ndarray) -> Any:
        return jaxkv.HostIds(ids) if self.ids == HOST_IDS else jnp.asarray(ids)

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
        """Context in which jaxkv uses this implementation; no effect for others."""
        if self.name not in copy_table.IMPLEMENTATIONS:
            return contextlib.nullcontext()
        return force_implementation(self.name, num_sms)


def methods() -> list[Method]:
    """All implementations with the ids that they take."""
    if jax.default_backend() == "cpu":
        return [Method("host"), Method("host", HOST_IDS)]
    return [Method("kernel"), Method("kernel", HOST_IDS), Method("pallas"), Method("dma", HOST_IDS)]


def implementations(*, without: str = "") -> list[Method]:
    """Each implementation with one form of ids."""
    return [m for m in methods() if str(m) == m.name != without]


CHOICES = Method(CHOSEN), Method(CHOSEN, HOST_IDS)


class Program:
    """A jitted copy, whose destination is donated to each call and kept in `ends` in between.

    Args:
      ends: source and destination under "host" and "device": arrays, or a pool and a cache.
      direction: one of DIRECTIONS.
      copy: `(source, destination, ids) -> destination`.
      ids: its last argument.
      stamped: stamps before and after the copy.
      taken: context of all calls, as any may compile.
      num_sms: SMs per copy; 0 for the copy engine, the host and baselines.

    Attributes:
      calls: length of a chain.
    """

    def __init__(
        self,
        ends: dict[str, Any],
        direction: str,
        copy: Callable[[Any, Any, Any], Any],
        ids: Any,
        *,
        stamped: bool = False,
        taken: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        num_sms: int = 0,
    ):
        self._ends, self._ids, self._taken = ends, ids, taken
        self._source, self._destination = names(direction)
        self.num_sms, self.calls = num_sms, 1

        @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        def step(destination: Any, source: Any, ids: Any) -> Any:
            destination = timestamps.stamp(destination, 0) if stamped else destination
            destination = copy(source, destination, ids)
            return timestamps.stamp(destination, 1) if stamped else destination

        self.jitted = step

    def arguments(self) -> tuple[Any, Any, Any]:
        return self._ends[self._destination], self._ends[self._source], self._ids

    def step(self, destination: Any) -> Any:
        return self.jitted(destination, self._ends[self._source], self._ids)

    def run(self) -> None:
        self.advance(self.step)

    def warm_up(self, seconds: float) -> None:
        """Sets the length of a chain to about this time, after the graphs are captured."""
        self.idle_calls(2)  # slower than later ones, up to the length of a chain
        call = self.idle_calls(3)
        self.calls = max(1, min(timing.MAX_CALLS, int(seconds / call.done)))

    def chain(self) -> float:
        """Seconds per call in one chain."""
        run = functools.partial(
            timing.seconds_per_call, self.step, calls=self.calls, repeats=1, warmup=0
        )
        return float(self.advance(run))

    def measure(self) -> timestamps.Timed:
        """Times a program with stamps."""
        return self.advance(functools.partial(timestamps.measure, self.step))

    def prepare(self) -> None:
        """Warms up a program with stamps for `sample`."""
        self.calls = self.advance(functools.partial(timestamps.warmed_up, self.step))

    def sample(self) -> timestamps.Sample:
        return self.advance(functools.partial(timestamps.sample, self.step, calls=self.calls))

    def idle_calls(self, repeats: int, after: Callable[[], None] = lambda: None) -> timing.Call:
        """Times single calls on an idle device."""
        run = functools.partial(timing.single_call, self.step, repeats=repeats, after=after)
        return self.advance(run)

    def stamped_calls(self, repeats: int) -> tuple[timing.Call, timing.Figure]:
        """`idle_calls` of a program with stamps, and the host time between them."""
        spans: list[float] = []
        call = self.idle_calls(repeats, after=lambda: spans.append(timestamps.stamped()[0]))
        return call, timing.median(spans)

    def advance(self, run: Callable[[Any], Any]) -> Any:
        """Runs `destination -> destination` or `-> (figure, destination)`; returns the figure.

        After an error the destination is still in `ends`, unless it was donated.
        """
        old = self._ends.pop(self._destination)
        try:
            with self._taken():
                result = run(old)
        except Exception:
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(old)):
                self._ends[self._destination] = old
            raise
        figure, new = result if type(result) is tuple else (None, result)
        self._ends[self._destination] = jax.block_until_ready(new)
        jaxkv.check_errors()
        return figure


def copy_pages(direction: str, **options: Any) -> Callable[[Any, Any, Any], Any]:
    """The `copy` of a Program between a pool and a cache; ids: (host pages, device pages)."""
    if direction == "load":
        return lambda pool, cache, ids: jaxkv.load_pages(pool, cache, *ids, **options)
    return lambda cache, pool, ids: jaxkv.store_pages(pool, cache, *ids, **options)


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

    def ids(self, method: Method, count: int, seed: int) -> tuple[Any, Any]:
        """(source, destination) ids in the form of the method, and as NumPy arrays."""
        rng = np.random.default_rng(seed)
        plain = tuple(
            rng.choice(self.num_blocks, count, replace=False).astype(np.int32) for _ in range(2)
        )
        if method.ids == HOST_IDS:
            return jaxkv.HostIdPair(*plain), plain  # type: ignore[return-value,arg-type]
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
    ) -> Program:
        """A compiled and verified program, with or without stamps around its copies.

        Raises:
          NotImplementedError: the implementation does not support the call.
          AssertionError: wrong bytes.
        """
        made = [self.ids(method, count, seed) for seed in range(copies)]
        source, destination = self.sides(direction)
        pinned = copy_baselines.reads_pinned(source)
        sms = method.sms_for(jaxkv.swap_blocks, source, destination, *made[0][0])

        def copy(source: jax.Array, destination: jax.Array, ids: Any) -> jax.Array:
            for pair in ids:
                destination = _copy(method.name, source, destination, *pair, pinned=pinned)
            return destination

        program = Program(
            self.arrays, direction, copy, [ids for ids, _ in made], stamped=stamped,
            taken=lambda: method.taken(sms), num_sms=sms,
        )  # fmt: skip
        plain = [plain for _, plain in made]
        program.advance(lambda array: verified(program.step, source, array, plain))
        return program


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


@jax.jit
def gathered(cache: Any, pages: Any) -> Any:
    """These pages of all arrays."""
    return jax.tree.map(lambda array: array[pages], cache)


FACTORS = (2654435761, 40503, 2246822519, 3266489917, 668265263, 374761393)


# The contents are unused, and an unused argument is only donated if kept: both may not fit.
@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def randomized(tree: Any, seed: int | jax.Array = 0) -> Any:
    """Pseudo-random small integers; copies of zeros can be faster than those of data."""

    def noise(x: jax.Array, number: int) -> jax.Array:
        mixed = jnp.full(x.shape, jnp.uint32(seed) * jnp.uint32(97) + jnp.uint32(number))
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
