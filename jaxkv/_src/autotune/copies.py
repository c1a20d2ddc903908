"""Measures the implementations of page copies: `python -m jaxkv.tune [--out FILE] [--quick]`.

With `--all-reduce`, measures the algorithms of `jaxkv.all_reduce` instead (autotune/all_reduce.py).

Writes a tuning table for this device kind (format: `copy_table`). Blocks are scattered over arrays
as large as an engine's (`pools`), and each copy of a program has its own, because the host would
cache repeated ones. Before a candidate is timed, copied blocks, their neighbours and a sample of
the others are compared. GB/s is payload (1e9 bytes) per second of wall time, over back-to-back
copies on the device.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._src.autotune import all_reduce, measurement
from jaxkv._src.autotune.pools import Pools, pool_bytes, verified
from jaxkv._src.autotune.rules import rules_of
from jaxkv._src.environment import probes
from jaxkv._src.transfer.dispatch import force_implementation
from jaxkv._src.tuning import copy_lookup, copy_table, table_files
from jaxkv._src.tuning.copy_lookup import DerivedTable
from jaxkv._src.tuning.copy_table import Candidate, CopySize, Table
from jaxkv._src.tuning.hardware import hardware_of

MEMORIES = {
    "load": ("pinned_host", "device"),
    "store": ("device", "pinned_host"),
    "device": ("device", "device"),
}
KIB, MIB = 1 << 10, 1 << 20
MAX_PAYLOAD = 64 * MIB
MAX_IDS = 10_000
PROGRAM_BYTES = 1280 * MIB  # more than last-level caches and TLBs hold
MOST_COPIES = 20  # of a program, which may then have fewer bytes
SECONDS_OF_SAMPLE, SAMPLES = 0.015, 3
PASSES = 2  # over all candidates of a cell; what else the host does can slow down a pass


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
    powers = [KIB // 2 << i for i in range(8)]  # 512 B to 64 KiB
    cliff = [28 * KIB]  # the copy engine's rate jumps in this range
    all_runs = [*powers, *cliff, 256 * KIB, MIB]
    few_runs, few_sms = [KIB // 2, 4 * KIB, 32 * KIB, 256 * KIB], [4, 12]
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
            found += _grid(direction, all_runs, [MAX_IDS], [2, 4, 12])
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


def measure(cell: Cell, pools: Pools) -> list[Candidate]:
    """Rates of the candidates that support a cell, each that of its faster pass.

    Raises:
      RuntimeError: a candidate produced an incorrect destination.
    """
    blocks = _Blocks(cell, pools)
    runs: dict[Candidate, Callable[[], float]] = {}
    unsupported: set[str] = set()
    for candidate in cell.candidates:
        if candidate.implementation in unsupported:
            continue
        try:
            runs[candidate] = _rate_function(blocks, candidate)
        except NotImplementedError:
            unsupported.add(candidate.implementation)
    passes = [{candidate: run() for candidate, run in runs.items()} for _ in range(PASSES)]
    return [
        candidate._replace(gb_per_s=_rounded(max(rates[candidate] for rates in passes)))
        for candidate in runs
    ]


def copies_of(cell: Cell, num_blocks: int) -> int:
    """Copies in a program, all of different blocks."""
    wanted = MOST_COPIES if cell.direction == "device" else PROGRAM_BYTES // cell.size.total_bytes
    return max(1, min(MOST_COPIES, wanted, num_blocks // cell.num_ids))


class _Blocks:
    """Arrays of a cell, and the blocks of each copy; the destination is donated."""

    def __init__(self, cell: Cell, pools: Pools) -> None:
        self.cell = cell
        self.source, self.destination = (
            pools.host(cell.run_bytes)
            if memory == "pinned_host"
            else pools.device(
                cell.run_bytes,
                num_bytes=pools.num_bytes // (2 if cell.direction == "device" else 1),
                seed=seed,
            )
            for seed, memory in enumerate(MEMORIES[cell.direction])
        )
        copies = copies_of(cell, min(len(self.source), len(self.destination)))
        rng = np.random.default_rng(cell.num_ids)
        source_ids, destination_ids = (
            rng.choice(len(array), (copies, cell.num_ids), replace=False).astype(np.int32)
            for array in (self.source, self.destination)
        )
        self.ids = [*zip(source_ids, destination_ids, strict=True)]

    def verify(self, copy: Callable[[jax.Array], jax.Array], candidate: Candidate) -> None:
        """Raises a RuntimeError unless `copy` writes the blocks of the cell, and no others."""
        try:
            self.destination = verified(copy, self.source, self.destination, self.ids)
        except AssertionError as error:
            what = f"{candidate.implementation} {candidate.figures}"
            raise RuntimeError(f"{self.cell}: incorrect destination of {what}: {error}") from error
        jaxkv.check_errors(self.destination)


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")  # further digits are noise


def _rate_function(blocks: _Blocks, candidate: Candidate) -> Callable[[], float]:
    """A function that measures the GB/s of a candidate, once its copies are verified.

    Raises:
      NotImplementedError: it does not support the cell.
      RuntimeError: it produced an incorrect destination.
    """
    as_ids = jaxkv.HostIds if candidate.implementation == "dma" else jnp.asarray
    all_ids = [tuple(map(as_ids, pair)) for pair in blocks.ids]

    # A new function for each candidate, to bypass JAX's jit cache.
    def copy(destination: jax.Array, source: jax.Array, *ids: Ids) -> jax.Array:
        return jaxkv.swap_blocks(source, destination, *ids)

    once = jax.jit(copy)

    @functools.partial(jax.jit, donate_argnums=0)
    def several(
        destination: jax.Array, source: jax.Array, all_ids: list[tuple[Ids, ...]]
    ) -> jax.Array:
        for ids in all_ids:
            destination = once(destination, source, *ids)
        return destination

    def step(destination: jax.Array) -> jax.Array:
        return several(destination, blocks.source, all_ids)

    def rate() -> float:
        with force_implementation(candidate.implementation, candidate.num_sms):
            seconds, blocks.destination = measurement.seconds_per_step(
                step, blocks.destination, seconds_of_sample=SECONDS_OF_SAMPLE, samples=SAMPLES
            )
        return len(all_ids) * blocks.cell.size.total_bytes / seconds / 1e9

    with force_implementation(candidate.implementation, candidate.num_sms):
        several.trace(blocks.destination, blocks.source, all_ids)  # raises before any donation
        blocks.verify(step, candidate)
    return rate


# ---------------------------------------------------------------------------------------------
# The table, and its differences from another


Rates = list[tuple[Cell, list[Candidate]]]


def table_of(rates: Rates, peak_gb_per_s: dict[str, float], how: str) -> Table:
    """The table for this device kind; "overlapped" rules are not measured, but packaged ones."""
    device = jax.local_devices()[0]
    kind = device.device_kind
    rules = {
        direction: rules_of([(cell.size, m) for cell, m in rates if cell.direction == direction])
        for direction in MEMORIES
    }
    packaged = copy_lookup.packaged_table(kind)  # the default table if there is none
    assert isinstance(packaged, Table)
    return Table(
        name=f"{table_files.slug(kind)}.json",
        device_kind=kind,
        how=how,
        commit=measurement.commit(),
        date=probes.date(),
        versions=measurement.versions(),
        hardware=hardware_of(device),
        peak_gb_per_s={name: _rounded(rate) for name, rate in peak_gb_per_s.items()},
        rules={**rules, "overlapped": packaged.rules["overlapped"]},
    )


def changes(rates: Rates, before: Table | DerivedTable, after: Table) -> list[str]:
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
                here = {candidate[:2]: candidate for candidate in measured}
                choices = (c and here.get(c[:2], Candidate(*c[:2])) for c in (old, new))
                lines.append(f"{cell}, {ids}: {' -> '.join(map(_text, choices))}")
    return lines


def _text(candidate: Candidate | None) -> str:
    return f"{candidate.implementation} {candidate.figures}" if candidate else "none"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxkv.tune", description=__doc__)
    parser.add_argument(
        "--out", metavar="PATH", help="the table, or the folder of <device kind>.json (default: .)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--all-reduce", action="store_true", help="the table of all-reduces")
    flags = parser.parse_args(argv)
    if flags.all_reduce:
        all_reduce.run(flags.out, quick=flags.quick)
    else:
        run(flags.out, quick=flags.quick)
    return 0


def run(out: str | None, *, quick: bool) -> None:
    """Measures, prints and writes the table.

    Args:
      out: output file, or a folder for `<device kind>.json`; by default the current one.
      quick: fewer cells.

    Raises:
      RuntimeError: a candidate produced an incorrect destination.
      HostMemoryError: too little host memory for the largest copy.
      FileExistsError: the output file exists, and is not a table of copies.
      OSError: the table can't be written.
    """
    platform, device = jax.default_backend(), jax.local_devices()[0]
    before = copy_lookup.packaged_table(device.device_kind, hardware_of(device))
    path = table_files.output_path(out, f"{table_files.slug(device.device_kind)}.json")
    measurement.check_replaceable(path, copy_table.load, "page copies")
    link = Candidate("host" if platform == "cpu" else "dma", 0)
    peak_bytes = MIB if platform == "cpu" else MAX_PAYLOAD
    peak_cells = [Cell(direction, peak_bytes, 1, (link,)) for direction in MEMORIES]
    found = cells(platform, getattr(device, "core_count", 0), quick)
    largest = max(cell.size.total_bytes for cell in [*peak_cells, *found])
    pools = Pools(pool_bytes(2 * largest))
    peak = {cell.direction: _rate_function(_Blocks(cell, pools), link)() for cell in peak_cells}
    print(
        "peak bandwidth, one block:", ", ".join(f"{d} {rate:.4g} GB/s" for d, rate in peak.items())
    )
    rates = [
        (cell, measured)
        for cell in measurement.progress(found)
        if (measured := measure(cell, pools))
    ]
    for cell, measured in rates:
        print(f"{cell}: {'; '.join(map(_text, measured))}")
    how = (
        f"python -m jaxkv.tune{' --quick' if quick else ''}, "
        f"arrays of {pools.num_bytes / (1 << 30):.3g} GiB"
    )
    table = table_of(rates, peak, how)
    measurement.write(path, table.to_text())
    different = changes(rates, before, copy_table.load(path))
    print(table.to_text())
    print(f"choices that differ from {before.source}:", *different or ["none"], sep="\n  ")
    print(f"wrote {path}; set {copy_lookup.VARIABLE}={path} to use it")
