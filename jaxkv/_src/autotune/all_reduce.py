"""Measures the algorithms of `jaxkv.all_reduce`: `python -m jaxkv.tune --all-reduce`.

Writes a tuning table for this device kind (format: `all_reduce_table`), for each number of devices
available on this machine; the packaged rules apply to other numbers. The timed program is a jitted
chain of all-reduces, each followed by a multiplication, as in a step; this includes the cost of
XLA's psum, one of the candidates, outside its kernel. Results are checked against NumPy first.

Rules apply to bfloat16 and float32 alike, and float16 behaves as bfloat16: the link transfer
dominates, not the arithmetic, so a table by bytes covers all dtypes. Both dtypes are measured and
the slower time is used; sizes at which their choices differ are reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.autotune import measurement
from jaxkv._src.collectives.symmetric_memory import SymmetricMemory
from jaxkv._src.environment import probes
from jaxkv._src.tuning import table_files
from jaxkv._src.tuning.all_reduce_table import (
    ALGORITHMS,
    VARIABLE,
    WORLD_SIZES,
    Algorithm,
    Table,
    load,
    packaged_table,
)

AXIS = "devices"
DTYPES = ("bfloat16", "float32")
MIN_BYTES = 1 << 10
MAX_BYTES = {"cpu": 64 << 10, "gpu": 64 << 20}
LONG_BYTES = 8 << 20  # from this size on, fewer calls suffice
CALLS, CALLS_OF_LONG = 32, 8
NOISE = 0.1  # relative; variation of the host time of short calls


class Cell(NamedTuple):
    """Messages to measure: `num_bytes` bytes on each of `world_size` devices."""

    world_size: int
    num_bytes: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.world_size} devices, {self.num_bytes} bytes of {self.dtype}"


# Seconds by algorithm, for those that support the cell.
Seconds = dict[str, float]


def cells(platform: str, num_devices: int, *, quick: bool) -> list[Cell]:
    """All cells, by number of devices and size.

    Args:
      platform: JAX's platform; only small messages on CPU.
      num_devices: number of available devices.
      quick: every other size, one dtype.
    """
    first, last = MIN_BYTES.bit_length() - 1, MAX_BYTES[platform].bit_length()
    return [
        Cell(world_size, 1 << power, dtype)
        for world_size in WORLD_SIZES
        if world_size <= num_devices
        for power in range(first, last, 2 if quick else 1)
        for dtype in DTYPES[: 1 if quick else None]
    ]


@functools.cache
def _memory(world_size: int) -> SymmetricMemory:
    devices = jax.local_devices()[:world_size]
    mesh = Mesh(np.array(devices), (AXIS,))
    return SymmetricMemory.create(mesh, AXIS, max_bytes=MAX_BYTES[devices[0].platform])


def measure(cell: Cell) -> Seconds:
    """Seconds of an all-reduce by each algorithm that supports the cell.

    Raises:
      RuntimeError: an incorrect result.
      PeerTimeoutError: a device timed out waiting for a peer.
    """
    memory = _memory(cell.world_size)
    found: Seconds = {}
    operand, expected = (
        jax.device_put(array, NamedSharding(memory.mesh, spec))
        for array, spec in zip(_operand(cell), (PartitionSpec(AXIS), PartitionSpec()), strict=True)
    )
    for algorithm in ALGORITHMS:
        if not supports(memory, cell.dtype, algorithm, cell.num_bytes):
            continue
        step, calls = _chain(memory, cell, algorithm)
        summed = step(jnp.copy(operand))  # the operand is donated
        memory.check_errors(summed)
        if not (summed == expected).all():
            raise RuntimeError(f"{cell}: incorrect result of {algorithm}")
        seconds, _ = measurement.seconds_per_step(step, summed)
        found[algorithm] = seconds / calls
    return found


def supports(memory: SymmetricMemory, dtype: str, algorithm: str, num_bytes: int) -> bool:
    """Whether an algorithm supports messages of `num_bytes` bytes."""
    count = num_bytes // jnp.dtype(dtype).itemsize
    message = jax.ShapeDtypeStruct((count,), dtype)
    try:
        jaxkv.explain(jaxkv.all_reduce, memory, message, AXIS, implementation=algorithm)
    except NotImplementedError:
        return False
    return True


def _operand(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """One row for each device, and their mean; all partial sums are exact in each dtype."""
    count = cell.num_bytes // jnp.dtype(cell.dtype).itemsize
    noise = np.random.default_rng(0).integers(0, 8, (cell.world_size, count), np.int8)
    return (noise * np.int8(cell.world_size)).astype(cell.dtype), noise.sum(0).astype(cell.dtype)


def _chain(
    memory: SymmetricMemory, cell: Cell, algorithm: Algorithm
) -> tuple[Callable[[jax.Array], jax.Array], int]:
    """A program with a chain of means over the devices, and the length of the chain."""
    calls = CALLS_OF_LONG if cell.num_bytes >= LONG_BYTES else CALLS

    @jax.jit
    def mean(x: jax.Array) -> jax.Array:
        return jaxkv.all_reduce(memory, x, AXIS, implementation=algorithm) / cell.world_size

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(calls):
            x = mean(x)
        return x

    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(chain, mesh=memory.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped, donate_argnums=0)  # else every call updates its CUDA graph
    if jax.default_backend() == "cpu":  # queued calls take threads from running ones
        return lambda x: program(x).block_until_ready(), calls
    return program, calls


# --------------------------------------------------------------------------------------------------
# From seconds to rules


def rules_of(
    measured: Mapping[int, Sequence[Seconds]], supports: Callable[[str, int], bool]
) -> list[tuple[int, str]]:
    """(min_bytes, algorithm), ascending from 0.

    An algorithm is kept until another is faster by more than noise, or until its size limit.

    Args:
      measured: seconds of each dtype, by size in bytes.
      supports: whether an algorithm supports messages of a given number of bytes.
    """
    first, *others = sorted(measured)
    rules = [(0, _fastest(measured[first]))]
    before = first
    for num_bytes in others:
        worst, (_, last) = slowest(measured[num_bytes]), rules[-1]
        best = _fastest(measured[num_bytes])
        if last not in worst:  # a rule from `num_bytes` on would leave the gap to psum
            rules.append((_first_unsupported(last, before, num_bytes, supports), best))
        elif worst[last] * (1 - NOISE) > min(worst.values()):
            rules.append((num_bytes, best))
        before = num_bytes
    return rules


def _fastest(of_dtypes: Sequence[Seconds]) -> str:
    """The first of the fastest within noise; ALGORITHMS is sorted by synchronization cost."""
    worst = slowest(of_dtypes)
    best = min(worst.values())
    return next(name for name in worst if worst[name] * (1 - NOISE) <= best)


def slowest(of_dtypes: Sequence[Seconds]) -> Seconds:
    """Seconds of the slower dtype, for algorithms that support all dtypes."""
    common = set.intersection(*({*seconds} for seconds in of_dtypes))
    return {
        name: max(seconds[name] for seconds in of_dtypes) for name in ALGORITHMS if name in common
    }


def _first_unsupported(
    algorithm: str,
    supported: int,
    unsupported: int,
    supports: Callable[[str, int], bool],
) -> int:
    while unsupported - supported > 1:
        middle = (supported + unsupported) // 2
        supported, unsupported = (
            (middle, unsupported) if supports(algorithm, middle) else (supported, middle)
        )
    return unsupported


def table_of(measured: Mapping[Cell, Seconds], how: str) -> Table:
    """The table for this device kind, with packaged rules for unmeasured numbers of devices."""
    kind = jax.local_devices()[0].device_kind
    rules = dict(packaged_table(kind).rules)
    world_sizes = sorted({cell.world_size for cell in measured})
    for world_size in world_sizes:
        sizes: dict[int, list[Seconds]] = {}
        for cell, seconds in measured.items():
            if cell.world_size == world_size:
                sizes.setdefault(cell.num_bytes, []).append(seconds)
        rules[world_size] = tuple(
            rules_of(sizes, functools.partial(supports, _memory(world_size), DTYPES[0]))
        )
    return Table(
        name=f"{table_files.slug(kind)}.json",
        device_kind=kind,
        how=f"{how}, on {', '.join(map(str, world_sizes))} devices",
        commit=measurement.commit(),
        date=probes.date(),
        versions=measurement.versions(),
        rules=rules,
    )


def differences(measured: Mapping[Cell, Seconds]) -> list[str]:
    """Sizes at which the best algorithm differs between dtypes by more than noise."""
    lines = []
    for cell, seconds in measured.items():
        other = measured.get(cell._replace(dtype=DTYPES[0]), seconds)
        best, other_best = (min(one, key=lambda name: one[name]) for one in (seconds, other))
        if other_best in seconds and seconds[other_best] * (1 - NOISE) > seconds[best]:
            lines.append(f"{cell}: {best}, and {other_best} of {DTYPES[0]}")
    return lines


def run(out: str | None, *, quick: bool) -> None:
    """Measures, prints and writes the table.

    Args:
      out: output file, or a folder for `<device kind>.json`; by default a file named
        `all_reduce_<device kind>.json`.
      quick: fewer sizes.

    Raises:
      RuntimeError: only one device, or an incorrect result.
      FileExistsError: the output file exists, and is not a table of all-reduces.
      OSError: the table can't be written.
    """
    devices = jax.local_devices()
    name = f"{table_files.slug(devices[0].device_kind)}.json"
    path = table_files.output_path(out or f"all_reduce_{name}", name)
    measurement.check_replaceable(path, load, "all-reduces")
    found = cells(devices[0].platform, len(devices), quick=quick)
    if not found:
        raise RuntimeError(f"all_reduce requires at least {WORLD_SIZES[0]} devices, found 1")
    measured = {}
    for cell in measurement.progress(found):
        measured[cell] = measure(cell)
    for cell, seconds in measured.items():
        print(f"{cell}:", ", ".join(f"{name} {t * 1e6:.4g} us" for name, t in seconds.items()))
    print("choices that differ by dtype:", *differences(measured) or ["none"], sep="\n  ")
    table = table_of(measured, f"python -m jaxkv.tune --all-reduce{' --quick' if quick else ''}")
    measurement.write(path, table.to_text())
    print(table.to_text())
    print(f"wrote {path}; set {VARIABLE}={path} to use it")
