"""Copies of scattered blocks between two arrays, verified and then timed.

The timed unit is one jitted program with several copies, each with its own ids and dependent on the
previous one, as the layers of a step: this amortizes XLA's cost per execution as in a step. Calls
of the program follow each other in a chain with donation.
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
from jaxkv._src.explain import selections_of
from jaxkv._src.transfer.dispatch import force_implementation
from jaxkv._src.tuning import copy_table

DIRECTIONS = ("load", "store")
IMPLEMENTATIONS = {"cpu": ("host",), "gpu": ("kernel", "pallas", "dma")}
SM_IMPLEMENTATIONS = copy_table.ON_SMS
WORD = jnp.int32


class Method(NamedTuple):
    """A copy method: an implementation of jaxkv, or a baseline inside JAX.

    Attributes:
      name: of the implementation or the baseline.
      num_sms: number of SMs, None for that of the table.
    """

    name: str
    num_sms: int | None = None

    @property
    def is_baseline(self) -> bool:
        return self.name in copy_baselines.CODES

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


class Blocks:
    """Random blocks on either side of the link: `int32[num_blocks, words]`, made on the device."""

    def __init__(self, block_bytes: int, max_count: int):
        self.block_bytes = block_bytes
        self.num_blocks = max_count + max_count // 16 + 1  # some are never copied
        self._device = jax.local_devices()[0]
        self.arrays: dict[str, jax.Array] = {}
        self.fill()

    def fill(self) -> None:
        """Creates missing arrays: at first both sides, later those consumed by a failed program."""
        shape = (self.num_blocks, self.block_bytes // np.dtype(WORD).itemsize)
        for seed, (side, kind) in enumerate((("host", "pinned_host"), ("device", "device"))):
            if side not in self.arrays:
                self.arrays[side] = jax.device_put(_random(shape, seed), self._sharding(kind))

    def _sharding(self, memory_kind: str) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(self._device, memory_kind=memory_kind)

    def ids(self, method: Method, count: int, seed: int) -> tuple[tuple[Any, Any], Any]:
        """(source, destination) ids in the form of the method, and as NumPy arrays."""
        rng = np.random.default_rng(seed)
        plain = tuple(rng.permutation(self.num_blocks)[:count].astype(np.int32) for _ in range(2))
        if method.name == "dma":
            return tuple(map(jaxkv.HostIds, plain)), plain  # type: ignore[return-value]
        kind = "pinned_host" if method.is_baseline else "device"
        put = functools.partial(jax.device_put, device=self._sharding(kind))
        # Baselines read them when the call is enqueued.
        return jax.block_until_ready(tuple(map(put, plain))), plain  # type: ignore[return-value]

    def sides(self, direction: str) -> tuple[str, str]:
        return ("host", "device") if direction == "load" else ("device", "host")

    def chosen(self, direction: str, count: int) -> str:
        """The implementation chosen by jaxkv's dispatch."""
        source, destination = (self.arrays[side] for side in self.sides(direction))
        ids, _ = self.ids(Method("dma"), count, 0)
        (choice,) = selections_of(jaxkv.swap_blocks, source, destination, *ids)
        return choice.implementation

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
        source, destination = self.sides(direction)
        before = self._on_device(destination)
        program.run_once()
        plain = np.array([ids for _, ids in made]).reshape(copies, 2, count)
        wrong = _mismatches(
            self._on_device(destination), before, self._on_device(source), jnp.asarray(plain)
        )
        if wrong:
            raise AssertionError(
                f"{method} {direction} {count} x {self.block_bytes}: {wrong} words"
            )
        return program

    def _on_device(self, side: str) -> jax.Array:
        """A separate copy, as the array may be donated."""
        if side == "host":
            return jax.device_put(self.arrays[side], self._sharding("device"), may_alias=False)
        return jnp.copy(self.arrays[side])


class Program:
    """A jitted chain of copies, and its arrays.

    Attributes:
      num_sms: SMs per copy; 0 for the copy engine, the host and baselines.
    """

    def __init__(
        self,
        blocks: Blocks,
        method: Method,
        direction: str,
        ids: list[tuple[Any, Any]],
        stamped: bool,
    ):
        self._blocks, self._method, self._ids = blocks, method, ids
        self._source, self._destination = blocks.sides(direction)
        arrays = (blocks.arrays[side] for side in (self._source, self._destination))
        self.num_sms = method.sms_for(jaxkv.swap_blocks, *arrays, *ids[0]) if ids else 0

        @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        def step(dst: jax.Array, src: jax.Array, ids: Any) -> jax.Array:
            dst = timestamps.stamp(dst, 0) if stamped else dst
            for sources, destinations in ids:
                dst = _copy(method.name, src, dst, sources, destinations)
            return timestamps.stamp(dst, 1) if stamped else dst

        self._jitted = step

    def step(self, destination: jax.Array) -> jax.Array:
        return self._jitted(destination, self._blocks.arrays[self._source], self._ids)

    def run_once(self) -> None:
        """The first run, which compiles."""
        self._advance(self.step)

    def measure(self) -> timestamps.Timed:
        """Times a program with stamps."""
        return self._advance(functools.partial(timestamps.measure, self.step))

    def idle_calls(self, repeats: int) -> timing.Call:
        """Times single calls on an idle device."""
        return self._advance(functools.partial(timing.single_call, self.step, repeats=repeats))

    def _advance(self, run: Callable[[Any], Any]) -> Any:
        """Runs `destination -> destination` or `-> (figure, destination)`; returns the figure."""
        arrays = self._blocks.arrays
        with self._method.taken(self.num_sms):  # for all runs, as any may compile
            result = run(arrays.pop(self._destination))
        figure, array = result if isinstance(result, tuple) else (None, result)
        arrays[self._destination] = jax.block_until_ready(array)
        jaxkv.check_errors()
        return figure


def _copy(name: str, src: jax.Array, dst: jax.Array, src_ids: Any, dst_ids: Any) -> jax.Array:
    if name in copy_baselines.CODES:
        return copy_baselines.copy(name, src, dst, src_ids, dst_ids)
    return jaxkv.swap_blocks(src, dst, src_ids, dst_ids)


@jax.jit
def equal(one: Any, other: Any) -> jax.Array:
    """Whether two pytrees have equal contents, as an array."""
    return jax.tree.reduce(jnp.logical_and, jax.tree.map(jnp.array_equal, one, other))


@functools.partial(jax.jit, static_argnums=0)
def _random(shape: tuple[int, ...], seed: int) -> jax.Array:
    # Random, because copies of zeros can be faster than copies of real data.
    bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, WORD)


@jax.jit
def _mismatches(
    after: jax.Array, before: jax.Array, source: jax.Array, ids: jax.Array
) -> jax.Array:
    """Number of words that differ from the result of copies with `ids`, int32[copies, 2, n]."""
    for sources, destinations in ids:
        before = before.at[destinations].set(source[sources])
    return jnp.sum(after != before)
