"""Selection of the tuning table of copies for a device.

In this order: the file that the environment variable JAXKV_TUNING names, the packaged file for the
device kind, and for other CUDA GPUs rules derived from the packaged files (`DerivedTable`).
Devices other than CUDA GPUs use `default.json`, which prefers the most portable implementations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jaxkv._src.tuning.copy_table import (
    ON_SMS,
    PACKAGED,
    SMALLEST,
    Candidate,
    CopySize,
    Implementation,
    Rule,
    Table,
    load,
)
from jaxkv._src.tuning.hardware import Hardware
from jaxkv._src.tuning.table_files import ANY_DEVICE, DEFAULT, slug

VARIABLE = "JAXKV_TUNING"


@dataclasses.dataclass(frozen=True)
class DerivedTable:
    """Rules for a GPU without a table of its own, from the tables of the GPUs nearest to it.

    Times carry over, not sizes: latencies and the cost of a descriptor are the same on a link of
    any rate, so that a copy on a link of half the rate behaves as one of twice the size on the
    measured link, and half the bytes in flight, thus half the SMs, saturate it. Within the device
    SMs count as a fraction of all SMs.

    Where the tables disagree, the implementation that loses least in the worst of them comes first,
    on as many SMs as the table that needs most. Rates are not carried over: they are unknown.

    Attributes:
      tables: the tables, each with `hardware`.
      hardware: the GPU.
    """

    tables: tuple[Table, ...]
    hardware: Hardware

    @property
    def source(self) -> str:
        """The tables, and the properties of the GPU by which they were selected."""
        names = " and ".join(table.source for table in self.tables)
        link = self.hardware.link or "unknown PCIe link, taken for equal"
        return f"derived from {names} for compute capability {self._capability}, {link}"

    @property
    def _capability(self) -> str:
        return self.hardware.compute_capability

    @property
    def head(self) -> dict[str, Any]:
        """Everything but the rules."""
        return {
            "derived_from": [table.head for table in self.tables],
            "hardware": self.hardware._asdict(),
        }

    def rule(self, copy_kind: str, size: CopySize) -> Rule:
        """The rule that applies to a copy; its minima are those of all tables."""
        rules = [self._rule_of(table, copy_kind, size) for table in self.tables]
        minima = CopySize(*map(max, zip(*(rule.minima for rule in rules), strict=True)))
        names = {candidate.implementation: None for rule in rules for candidate in rule.candidates}
        ranked = sorted(names, key=lambda name: _regret(name, rules))
        return Rule(minima, tuple(_with_most_sms(name, rules) for name in ranked))

    def _rule_of(self, table: Table, copy_kind: str, size: CopySize) -> Rule:
        """The rule of a table, in sizes and SMs of this GPU."""
        measured, this = table.hardware, self.hardware
        assert measured is not None
        link = sms = Fraction(1)
        if copy_kind == "device":
            sms = Fraction(this.num_sms, measured.num_sms)
        elif measured.link and this.link:
            link = sms = Fraction(this.link.mb_per_s, measured.link.mb_per_s)
        rule = table.rule(copy_kind, _measured_size(size, link))
        candidates = [
            candidate._replace(num_sms=min(math.ceil(candidate.num_sms * sms), this.num_sms))
            for candidate in rule.candidates
            # Pallas has other kernels for other major compute capabilities: no rate carries over.
            if candidate.implementation != "pallas" or this.major == measured.major
        ]
        return Rule(_minima_here(rule.minima, link), tuple(candidates))


def _measured_size(size: CopySize, link: Fraction) -> CopySize:
    """The size whose copy takes the same time on a link that is slower by the factor `link`."""
    run, total = (math.floor(value / link) for value in (size.run_bytes, size.total_bytes))
    return CopySize(size.word_bytes, max(run, SMALLEST.run_bytes), total)


def _minima_here(minima: CopySize, link: Fraction) -> CopySize:
    """The smallest size that `_measured_size` maps to a size that reaches `minima`."""
    run, total = (math.ceil(value * link) for value in (minima.run_bytes, minima.total_bytes))
    at_least_one = minima.run_bytes == SMALLEST.run_bytes
    return CopySize(minima.word_bytes, SMALLEST.run_bytes if at_least_one else run, total)


def _regret(name: Implementation, rules: Sequence[Rule]) -> tuple[float, int]:
    """Greatest loss against the choice of a rule, as a fraction of its rate; sum of the ranks."""
    losses, ranks = [], 0
    for rule in rules:
        names = [candidate.implementation for candidate in rule.candidates]
        rank = names.index(name) if name in names else len(names)
        ranks += rank
        best = rule.candidates[0].gb_per_s
        rate = rule.candidates[rank].gb_per_s if rank < len(names) else None
        losses.append(max(0.0, 1 - rate / best) if rate and best else float(rank > 0))
    return max(losses), ranks


def _with_most_sms(name: Implementation, rules: Sequence[Rule]) -> Candidate:
    sms = [c.num_sms for rule in rules for c in rule.candidates if c.implementation == name]
    return Candidate(name, max(sms) if name in ON_SMS else 0)


def nearest(tables: Sequence[Table], hardware: Hardware) -> tuple[Table, ...]:
    """Tables of the same major compute capability, and of these of the same PCIe generation.

    A property that no table shares is ignored, so that the result has a table if any does.
    """
    found = [(table, table.hardware) for table in tables if table.hardware]
    found = [entry for entry in found if entry[1].major == hardware.major] or found
    generation = hardware.pcie_generation
    found = [entry for entry in found if entry[1].pcie_generation == generation] or found
    return tuple(table for table, _ in found)


def table_for(device_kind: str, hardware: Hardware | None = None) -> Table | DerivedTable:
    """The table for a device; see the module docstring for the selection.

    Args:
      device_kind: JAX's device kind.
      hardware: properties of a CUDA GPU, used if there is no table for its kind; None for others.

    Raises:
      ValueError: the file is not a valid table, or JAXKV_TUNING names one for another device kind.
      OSError: the file named by JAXKV_TUNING can't be read.
    """
    return _table_for(device_kind, hardware, os.environ.get(VARIABLE))


@functools.cache
def _table_for(
    device_kind: str, hardware: Hardware | None, chosen: str | None
) -> Table | DerivedTable:
    if chosen:
        table = load(chosen)
        if table.device_kind not in (device_kind, ANY_DEVICE):
            raise ValueError(
                f"{VARIABLE}={chosen}: the table is for device kind {table.device_kind!r}, "
                f"this device is {device_kind!r}"
            )
        return table
    return packaged_table(device_kind, hardware)


@functools.cache
def is_packaged(device_kind: str) -> bool:
    """Whether there is a packaged table for the device kind."""
    return slug(device_kind) in {table.name.removesuffix(".json") for table in _packaged()}


@functools.cache
def packaged_table(device_kind: str, hardware: Hardware | None = None) -> Table | DerivedTable:
    """The packaged table of the device kind, or else the derived or the default table."""
    for table in _packaged():
        if table.name == f"{slug(device_kind)}.json":
            return table
    tables = nearest(_packaged(), hardware) if hardware else ()
    return DerivedTable(tables, hardware) if hardware and tables else default_table()


@functools.cache
def _packaged() -> tuple[Table, ...]:
    return tuple(load(path) for path in sorted(PACKAGED.glob("*.json")))


@functools.cache
def default_table() -> Table:
    """The table for devices other than CUDA GPUs: no measurements."""
    return load(PACKAGED / DEFAULT)
