"""Measures the implementations of page copies: `python -m jaxkv.tune [--out FILE] [--quick]`.

With `--all-reduce`, measures the algorithms of `jaxkv.all_reduce` instead (autotune/all_reduce.py).

Writes a tuning table for this device kind (format: `copy_table`). Source and destination blocks
are in random order. Before a candidate is timed, every byte of the destination is compared with
the same copy by NumPy. GB/s is payload (1e9 bytes) per second of wall time, over back-to-back
copies on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._src.autotune import all_reduce, measurement
from jaxkv._src.autotune.rules import SAME_RATE, rules_of
from jaxkv._src.environment import probes
from jaxkv._src.transfer.dispatch import force_implementation
from jaxkv._src.tuning import copy_lookup, copy_table, table_files
from jaxkv._src.tuning.copy_table import Candidate, CopySize, Table

MEMORIES = {
    "load": ("pinned_host", "device"),
    "store": ("device", "pinned_host"),
    "device": ("device", "device"),
}
KIB, MIB = 1 << 10, 1 << 20
MAX_PAYLOAD = 64 * MIB
MAX_IDS = 10_000
SHORT_PAYLOAD = 32 * MIB  # below this, program overhead is significant
COPIES_OF_SHORT = 16


Ids = jaxkv.HostIds | jax.Array


class Cell(NamedTuple):
    """A copy to measure: blocks of one run each.

    Attributes:
      direction: "load", "store" or "device".
      run_bytes: bytes of a block.
      num_ids: number of blocks to copy.
      candidates: candidates to measure; those of one implementation by ascending number of SMs.
    """

    direction: str
    run_bytes: int
    num_ids: int
    candidates: tuple[Candidate, ...]

    @property
    def size(self) -> CopySize:
        word_bytes = math.gcd(16, self.run_bytes)
        return CopySize(word_bytes, self.run_bytes, self.num_ids * self.run_bytes)

    def __str__(self) -> str:
        return f"{self.direction}, {self.num_ids} x {self.run_bytes} bytes"


# ---------------------------------------------------------------------------------------------
# What to measure


def cells(platform: str, num_sms: int, quick: bool) -> list[Cell]:
    """All cells, by direction and size.

    Args:
      platform: JAX's platform; cpu only has the implementation "host".
      num_sms: SMs of the device.
      quick: fewer cells.
    """
    if platform == "cpu":
        counts, runs = ((16,), (4 * KIB,)) if quick else ((1, 64), (512, 4 * KIB, 64 * KIB))
        host = (Candidate("host", 0),)
        return [Cell(d, run, n, host) for d in MEMORIES for run in runs for n in counts]
    all_runs = [KIB // 2 << i for i in range(12)]  # 512 B to 1 MiB
    cliff = [20 * KIB, 24 * KIB, 28 * KIB]  # the copy engine's rate jumps in this range
    few_runs, few_sms = all_runs[::3], [4, 12]
    odd_runs = [even + odd for even in (KIB, 64 * KIB) for odd in (2, 8)]
    found = _grid("device", [KIB, 64 * KIB], [16, MAX_IDS], [num_sms // 4, num_sms // 2, num_sms])
    for direction in ("load", "store"):
        if quick:
            found += _grid(direction, odd_runs[:1], [16, MAX_IDS], few_sms)
            found += _grid(direction, few_runs, [16, MAX_IDS], few_sms)
        else:
            found += _grid(direction, odd_runs, [16, MAX_IDS], [12, 24])
            found += _grid(direction, few_runs, [1, 16, 256, 2048], few_sms)
            found += _grid(direction, [8 * KIB], [1, 4, 16, 64], few_sms)
            found += _grid(direction, [*all_runs, *cliff], [MAX_IDS], [1, 2, 4, 8, 12, 24])
    by_size = {(cell.direction, cell.size): cell for cell in found}  # last one wins
    return sorted(by_size.values())


def _grid(
    direction: str, runs: Sequence[int], counts: Sequence[int], sms: Sequence[int]
) -> list[Cell]:
    candidates = (
        Candidate("dma", 0),
        *(Candidate(name, n) for name in copy_table.ON_SMS for n in sms),
    )
    return [
        Cell(direction, run, min(count, MAX_PAYLOAD // run), candidates)
        for run in runs
        for count in counts
    ]


# ---------------------------------------------------------------------------------------------
# Measuring


def measure(cell: Cell) -> list[Candidate]:
    """Rates of the candidates that support a cell.

    The number of SMs of an implementation is increased only while the rate improves.

    Raises:
      RuntimeError: a candidate produced an incorrect destination.
    """
    data = _Data.of(cell)
    measured: list[Candidate] = []
    for _, same_implementation in groupby(cell.candidates, key=lambda c: c.implementation):
        best = 0.0
        for candidate in same_implementation:
            try:
                rate = _rate(cell, data, candidate)
            except NotImplementedError:
                break
            measured.append(candidate._replace(gb_per_s=_rounded(rate)))
            if rate * (1 - SAME_RATE) < best:
                break
            best = rate
    return measured


@dataclasses.dataclass(frozen=True)
class _Data:
    """Source and destination blocks, ids, and the expected destination."""

    source: jax.Array
    destination: np.ndarray
    ids: tuple[np.ndarray, np.ndarray]
    expected: jax.Array

    @classmethod
    def of(cls, cell: Cell) -> _Data:
        num_blocks = cell.num_ids + cell.num_ids // 8 + 1  # some stay unchanged
        dtype = {1: np.int8, 2: np.int16, 4: np.int32}[math.gcd(4, cell.run_bytes)]
        nbytes = num_blocks * cell.run_bytes
        source = _noise(1 << (nbytes - 1).bit_length())[:nbytes].view(dtype)
        source = source.reshape(num_blocks, -1)
        destination = ~source
        rng = np.random.default_rng(cell.num_ids)
        chosen = [rng.permutation(num_blocks)[: cell.num_ids].astype(np.int32) for _ in range(2)]
        expected = destination.copy()
        expected[chosen[1]] = source[chosen[0]]
        return cls(
            _put(source, MEMORIES[cell.direction][0]),
            destination,
            (chosen[0], chosen[1]),
            _put(expected, "device"),
        )


@functools.cache
def _noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")  # further digits are noise


def _put(array: np.ndarray, memory: str) -> jax.Array:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=memory)
    return jax.device_put(array, sharding)


def _rate(cell: Cell, data: _Data, candidate: Candidate) -> float:
    """GB/s of a candidate."""
    short = cell.direction == "device" or cell.size.total_bytes < SHORT_PAYLOAD
    copies = COPIES_OF_SHORT if short else 1
    as_ids = jaxkv.HostIds if candidate.implementation == "dma" else jnp.asarray
    # Separate id arrays for each copy; otherwise XLA merges the checks of the ids (CSE).
    all_ids = [[as_ids(side) for side in data.ids] for _ in range(copies)]

    # A new function for each candidate, to bypass JAX's jit cache.
    def copy(destination: jax.Array, source: jax.Array, *ids: Ids) -> jax.Array:
        return jaxkv.swap_blocks(source, destination, *ids)

    once = jax.jit(copy)

    @functools.partial(jax.jit, donate_argnums=0)
    def several(destination: jax.Array, source: jax.Array, all_ids: list[list[Ids]]) -> jax.Array:
        for ids in all_ids:
            destination = once(destination, source, *ids)
        return destination

    with force_implementation(candidate.implementation, candidate.num_sms):
        destination = _put(data.destination, MEMORIES[cell.direction][1])
        destination = several(destination, data.source, all_ids)
        _verify(cell, candidate, destination, data.expected)
        seconds = measurement.seconds_per_step(
            lambda array: several(array, data.source, all_ids), destination
        )
    return copies * cell.size.total_bytes / seconds / 1e9


def _verify(cell: Cell, candidate: Candidate, got: jax.Array, expected: jax.Array) -> None:
    jaxkv.check_errors(got)
    if not jnp.array_equal(jax.device_put(got, expected.sharding), expected):
        raise RuntimeError(
            f"{cell}: incorrect destination of {candidate.implementation} {candidate.figures}"
        )


# ---------------------------------------------------------------------------------------------
# The table, and its differences from another


Rates = list[tuple[Cell, list[Candidate]]]


def table_of(rates: Rates, peak_gb_per_s: dict[str, float], how: str) -> Table:
    """The table for this device kind; "overlapped" rules are not measured, but packaged ones."""
    kind = jax.local_devices()[0].device_kind
    rules = {
        direction: rules_of([(cell.size, m) for cell, m in rates if cell.direction == direction])
        for direction in MEMORIES
    }
    return Table(
        name=f"{table_files.slug(kind)}.json",
        device_kind=kind,
        how=how,
        commit=measurement.commit(),
        date=probes.date(),
        versions=measurement.versions(),
        peak_gb_per_s={name: _rounded(rate) for name, rate in peak_gb_per_s.items()},
        rules={**rules, "overlapped": copy_lookup.packaged_table(kind).rules["overlapped"]},
    )


def changes(rates: Rates, before: Table, after: Table) -> list[str]:
    """Measured cells for which the choices of two tables differ."""
    lines = []
    for cell, measured in rates:
        for ids, unsupported in (("HostIds", ()), ("device ids", ("dma",))):
            supported = {candidate.implementation for candidate in measured} - {*unsupported}
            old, new = (
                next(
                    (
                        c
                        for c in table.rule(cell.direction, cell.size).candidates
                        if c[0] in supported
                    ),
                    None,
                )
                for table in (before, after)
            )
            if new and (not old or old[:2] != new[:2]):
                lines.append(f"{cell}, {ids}: {_text(old)} -> {_text(new)}")
    return lines


def _text(candidate: Candidate | None) -> str:
    return f"{candidate.implementation} {candidate.figures}" if candidate else "none"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxkv.tune", description=__doc__)
    parser.add_argument("--out", metavar="FILE", help="the table, by default <device kind>.json")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--all-reduce", action="store_true", help="the table of all-reduces")
    flags = parser.parse_args(argv)
    if flags.all_reduce:
        all_reduce.run(flags.out, quick=flags.quick)
        return 0
    platform, device = jax.default_backend(), jax.local_devices()[0]
    link = Candidate("host" if platform == "cpu" else "dma", 0)
    peak_bytes = MIB if platform == "cpu" else MAX_PAYLOAD
    peak_cells = [Cell(direction, peak_bytes, 1, (link,)) for direction in MEMORIES]
    peak = {cell.direction: _rate(cell, _Data.of(cell), link) for cell in peak_cells}
    print(
        "peak bandwidth, one block:", ", ".join(f"{d} {rate:.4g} GB/s" for d, rate in peak.items())
    )
    found = cells(platform, getattr(device, "core_count", 0), flags.quick)
    rates = [
        (cell, measured) for cell in measurement.progress(found) if (measured := measure(cell))
    ]
    for cell, measured in rates:
        print(f"{cell}: {'; '.join(map(_text, measured))}")
    table = table_of(rates, peak, f"python -m jaxkv.tune{' --quick' if flags.quick else ''}")
    out = pathlib.Path(flags.out or table.name)
    out.write_text(table.to_text())
    packaged = copy_lookup.packaged_table(table.device_kind)
    different = changes(rates, packaged, copy_table.load(out))
    print(table.to_text())
    print(f"choices that differ from {packaged.source}:", *different or ["none"], sep="\n  ")
    print(f"wrote {out}; set {copy_lookup.VARIABLE}={out} to use it")
    return 0
