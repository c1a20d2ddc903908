"""Cases of the bandwidth benchmark: grids of sizes and counts, and rows as text and back."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.harness import copy_baselines
from bench.harness.records import Row
from bench.transfer.blocks import IMPLEMENTATIONS

KIB = 1024
BATCH_IN_JAX = f"{copy_baselines.BATCH} in JAX"
CHOSEN = "chosen implementation"
NAMES = tuple(name for names in IMPLEMENTATIONS.values() for name in names)


class Grid(NamedTuple):
    """Measured sizes and counts.

    Attributes:
      blocks: bytes of a block, measured with `many` of them.
      many: blocks of the main comparison.
      counted: sizes that are also measured with `counts` blocks.
      max_bytes: limit of one copy; reduces `many` for large blocks.
      peak_bytes: size of the contiguous copy.
    """

    blocks: tuple[int, ...]
    many: int
    counted: tuple[int, ...]
    counts: tuple[int, ...]
    max_bytes: int
    peak_bytes: int

    def counts_of(self, block_bytes: int) -> list[int]:
        limit = self.max_bytes // block_bytes
        others = [n for n in self.counts if block_bytes in self.counted and n <= limit]
        return sorted({min(self.many, limit), *others})


FULL = Grid(
    blocks=(512, *(KIB * k for k in (1, 2, 4, 8, 16, 28, 64, 256, 1024))),
    many=10_000,
    counted=tuple(KIB * k for k in (1, 4, 8, 16, 64, 1024)),
    counts=(1, 64, 1024, 100_000),
    max_bytes=2 << 30,
    peak_bytes=1 << 30,
)
QUICK_GPU = Grid((KIB, 8 * KIB), 1000, (8 * KIB,), (1,), 1 << 30, 1 << 30)
CPU = Grid((KIB, 8 * KIB, 64 * KIB), 1000, (8 * KIB,), (1, 64), 1 << 24, 1 << 24)
QUICK_CPU = Grid((KIB, 8 * KIB), 64, (8 * KIB,), (1,), 1 << 20, 1 << 20)


class Point(NamedTuple):
    """A measured bandwidth, and its text in a result file."""

    direction: str
    block_bytes: int
    num_blocks: int
    name: str
    num_sms: int

    @property
    def cell(self) -> str:
        return f"{self.direction}, {size_text(self.block_bytes)} x {self.num_blocks}"

    def __str__(self) -> str:
        return f"{self.cell}, {self.name}, {self.num_sms} SMs"

    @classmethod
    def parse(cls, text: str) -> "Point | None":
        """None for a case outside the grid."""
        match = re.fullmatch(r"(\w+), (\d+ \w+) x (\d+), (\w+), (\d+) SMs", text)
        if not match:
            return None
        direction, size, count, name, num_sms = match.groups()
        return cls(direction, size_bytes(size), int(count), name, int(num_sms))


UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


def size_text(nbytes: int) -> str:
    unit = next(unit for unit, size in UNITS.items() if nbytes % size == 0)
    return f"{nbytes // UNITS[unit]} {unit}"


def size_bytes(text: str) -> int:
    number, unit = text.split()
    return int(number) * UNITS[unit]


def points(rows: Sequence[Row]) -> dict[Point, Row]:
    """The bandwidths in the rows of a result file."""
    parsed = {Point.parse(row.case): row for row in rows if row.metric == "bandwidth"}
    return {point: row for point, row in parsed.items() if point}


def main_points(rows: Sequence[Row]) -> dict[Point, Row]:
    """For each direction and size, the bandwidths with about the same number of blocks."""
    found = points(rows)
    counts: dict[tuple[str, int], int] = {}
    for point in found:
        key = point[:2]
        counts[key] = min(counts.get(key, point.num_blocks), point.num_blocks, key=_far_from_many)
    return {point: row for point, row in found.items() if point.num_blocks == counts[point[:2]]}


def other_points(rows: Sequence[Row]) -> dict[Point, Row]:
    """Bandwidths with other numbers of blocks."""
    main = main_points(rows)
    return {point: row for point, row in points(rows).items() if point not in main}


def _far_from_many(num_blocks: int) -> float:
    return abs(math.log(num_blocks / FULL.many))
