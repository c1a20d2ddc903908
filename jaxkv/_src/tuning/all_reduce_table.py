"""Tuning tables of all-reduce: algorithm by message size, one JSON file for each device kind.

For each number of devices a file lists rules, sorted by minimum message size; the last rule whose
minimum a message reaches determines the algorithm. The rules apply to all dtypes: every algorithm
accumulates in float32, so only the number of bytes matters. `python -m jaxkv.tune --all-reduce`
writes a file.

File selection, in this order: the environment variable JAXKV_TUNING_ALL_REDUCE, the packaged file
for the device kind, `default.json`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import os
import pathlib
from typing import Literal, get_args

from jaxkv._src.tuning import table_files

WORLD_SIZES = (2, 4, 6, 8)  # numbers of devices that have kernels
# Candidates of the dispatch; multimem is only used on request.
Algorithm = Literal["low_latency", "one_shot", "two_shot", "psum"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
VARIABLE = "JAXKV_TUNING_ALL_REDUCE"
PACKAGED = pathlib.Path(__file__).parent / "data" / "all_reduce"
_HEAD = ("device_kind", "how", "commit", "date", "versions")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rules and their provenance.

    Attributes:
      name: file name without the directory.
      device_kind: JAX's device kind, or "any".
      how: command or method that produced the rules.
      commit, date, versions: provenance of the measurement; None and empty if there is none.
      rules: (min_bytes, algorithm) in ascending order, by number of devices.
    """

    name: str
    device_kind: str
    how: str
    commit: str | None
    date: str | None
    versions: dict[str, str]
    rules: dict[int, tuple[tuple[int, str], ...]]

    def algorithm(self, world_size: int, num_bytes: int) -> str:
        """The algorithm for a message of `num_bytes` bytes on each of `world_size` devices."""
        rules = self.rules[world_size]
        return rules[bisect.bisect_right(rules, num_bytes, key=lambda rule: rule[0]) - 1][1]

    def to_text(self) -> str:
        """The file's content: JSON, one line for each number of devices."""
        head = {name: getattr(self, name) for name in _HEAD}
        rules = ",\n".join(f'  "{size}": {json.dumps(r)}' for size, r in self.rules.items())
        beginning = json.dumps(head, indent=1)[:-2]  # without the closing brace
        return f'{beginning},\n "rules": {{\n{rules}\n }}\n}}\n'


def table_for(device_kind: str) -> Table:
    """The table for a device kind; see the module docstring for the file selection.

    Raises:
      ValueError: the file is not a valid table, or the variable names one for another device kind.
      OSError: the file named by the variable can't be read.
    """
    return _table_for(device_kind, os.environ.get(VARIABLE))


@functools.cache
def _table_for(device_kind: str, chosen: str | None) -> Table:
    if not chosen:
        return packaged_table(device_kind)
    table = load(chosen)
    if table.device_kind not in (device_kind, table_files.ANY_DEVICE):
        raise ValueError(
            f"{VARIABLE}={chosen}: the table is for device kind {table.device_kind!r}, "
            f"this device is {device_kind!r}"
        )
    return table


@functools.cache
def packaged_table(device_kind: str) -> Table:
    """The packaged table of the device kind, or the default table."""
    path = PACKAGED / f"{table_files.slug(device_kind)}.json"
    return load(path if path.exists() else PACKAGED / table_files.DEFAULT)


def load(path: str | os.PathLike[str]) -> Table:
    """Reads and validates a file; raises the errors of `table_files.read`."""
    return table_files.read(path, _parse)


def _parse(name: str, content: object) -> Table:
    if not isinstance(content, dict) or {*content} != {*_HEAD, "rules"}:
        raise ValueError(f"the file must be an object of {', '.join(_HEAD)} and rules")
    table_files._check_provenance(content)
    rules = content["rules"]
    if not isinstance(rules, dict) or [*rules] != [*map(str, WORLD_SIZES)]:
        raise ValueError(f"rules must have the keys {WORLD_SIZES} (devices), got {rules!r}")
    parsed = {int(size): _parse_rules(listed, f"rules.{size}") for size, listed in rules.items()}
    return Table(name=name, **{**content, "rules": parsed})


def _parse_rules(listed: object, where: str) -> tuple[tuple[int, str], ...]:
    if not isinstance(listed, list) or not all(
        isinstance(rule, list) and len(rule) == 2 and type(rule[0]) is int for rule in listed
    ):
        raise ValueError(f"{where} must be a list of [min_bytes, algorithm], got {listed!r}")
    minima = [rule[0] for rule in listed]
    for i, minimum in enumerate(minima):
        table_files._check_int(minimum, 0, f"{where}[{i}]: min_bytes")
    if minima[:1] != [0] or sorted({*minima}) != minima:
        raise ValueError(f"{where}: min_bytes must ascend from 0, got {minima}")
    for _, algorithm in listed:
        if algorithm not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ValueError(f"{where}: algorithm must be one of {known}, got {algorithm!r}")
    return tuple((min_bytes, algorithm) for min_bytes, algorithm in listed)
