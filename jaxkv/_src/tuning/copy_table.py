"""Tuning tables of copies: measured rates for `dispatch`, one JSON file for each device kind.

A table lists rules for each kind of copy: "load" (from host memory), "store" (to host memory),
"device" (neither), and "overlapped" (transfers concurrent with compute). Rules are sorted by their
minima; the last rule whose minima a copy reaches applies. Its candidates are implementations in
order of preference, each with a number of SMs and a measured rate; dispatch selects the first one
that supports the call. `python -m jaxkv.tune` writes a table, to be reviewed by hand.

File selection, in this order: the environment variable JAXKV_TUNING, the packaged file for the
device kind, `default.json`, which prefers the most portable implementations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from typing import Literal, NamedTuple, TypeAlias, get_args

from jaxkv._src.tuning.table_files import (
    ANY_DEVICE,
    DEFAULT,
    _check_int,
    _check_provenance,
    _check_rate,
    _object,
    read,
    slug,
)

VARIABLE = "JAXKV_TUNING"
Implementation: TypeAlias = Literal["dma", "kernel", "pallas", "host", "xla"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
ON_SMS: tuple[Implementation, ...] = ("kernel", "pallas")  # the others use no SMs: num_sms is 0
MOST_SMS = 4096  # of a rule; no GPU has as many
COPY_KINDS = ("load", "store", "device", "overlapped")
PACKAGED = pathlib.Path(__file__).parent / "data" / "copy"


class CopySize(NamedTuple):
    """Size of a copy, as the input of a rule; also the minima of a rule.

    Attributes:
      word_bytes: common alignment of all addresses, a power of two up to 16.
      run_bytes: bytes that are contiguous in both source and destination.
      total_bytes: payload of the call.
    """

    word_bytes: int
    run_bytes: int
    total_bytes: int

    def reaches(self, minima: CopySize) -> bool:
        return all(value >= minimum for value, minimum in zip(self, minima, strict=True))


SMALLEST = CopySize(1, 1, 0)  # minima of the first rule of each kind: some rule always applies


class Candidate(NamedTuple):
    """An implementation, its number of SMs, and its rate in GB/s (1e9), None if not measured."""

    implementation: Implementation
    num_sms: int
    gb_per_s: float | None = None

    @property
    def figures(self) -> str:
        """Rate and SMs as text; empty for a candidate without either."""
        rate = [] if self.gb_per_s is None else [f"{self.gb_per_s:.4g} GB/s"]
        sms = [f"on {self.num_sms} SM{'s' if self.num_sms > 1 else ''}"] if self.num_sms else []
        return " ".join(rate + sms)


class Rule(NamedTuple):
    """Candidates, best first, for copies that reach `minima`."""

    minima: CopySize
    candidates: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rules and their provenance.

    Attributes:
      name: file name without the directory.
      device_kind: JAX's device kind, or "any".
      how: command or method that produced the figures.
      commit: commit of jaxkv at the measurement, or None.
      date: date of the measurement (ISO 8601), or None.
      versions: software versions of the measurement.
      peak_gb_per_s: rate of one contiguous copy by direction, measured in the same run.
      rules: rules in ascending order, for each of `COPY_KINDS`.
    """

    name: str
    device_kind: str
    how: str
    commit: str | None
    date: str | None
    versions: dict[str, str]
    peak_gb_per_s: dict[str, float]
    rules: dict[str, tuple[Rule, ...]]

    @property
    def source(self) -> str:
        """The file name, and the commit or method behind its figures."""
        if self.commit is None:
            return f"{self.name} ({self.how})"
        dirty = "-dirty" if self.commit.endswith("-dirty") else ""
        return f"{self.name} (commit {self.commit[:9]}{dirty})"

    def rule(self, copy_kind: str, size: CopySize) -> Rule:
        """The rule that applies to a copy."""
        return last_matching_rule(self.rules[copy_kind], size)

    def to_text(self) -> str:
        """The file's content: JSON, one line for each rule."""
        head = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("name", "rules")
        }
        lists = []
        for copy_kind, rules in self.rules.items():
            lines = ",\n".join(f"   {_rule_text(rule)}" for rule in rules)
            lists.append(f'  "{copy_kind}": [\n{lines}\n  ]')
        beginning = json.dumps(head, indent=1)[:-2]  # without the closing brace
        return f'{beginning},\n "rules": {{\n' + ",\n".join(lists) + "\n }\n}\n"


def last_matching_rule(rules: tuple[Rule, ...] | list[Rule], size: CopySize) -> Rule:
    """The last rule whose minima `size` reaches."""
    return next(rule for rule in reversed(rules) if size.reaches(rule.minima))


def table_for(device_kind: str) -> Table:
    """The table for a device kind; see the module docstring for the file selection.

    Raises:
      ValueError: the file is not a valid table, or JAXKV_TUNING names one for another device kind.
      OSError: the file named by JAXKV_TUNING can't be read.
    """
    return _table_for(device_kind, os.environ.get(VARIABLE))


@functools.cache
def _table_for(device_kind: str, chosen: str | None) -> Table:
    if chosen:
        table = load(chosen)
        if table.device_kind not in (device_kind, ANY_DEVICE):
            raise ValueError(
                f"{VARIABLE}={chosen}: the table is for device kind {table.device_kind!r}, "
                f"this device is {device_kind!r}"
            )
        return table
    return packaged_table(device_kind)


@functools.cache
def packaged_table(device_kind: str) -> Table:
    """The packaged table of the device kind, or the default table."""
    path = PACKAGED / f"{slug(device_kind)}.json"
    return load(path) if path.exists() else default_table()


@functools.cache
def default_table() -> Table:
    """The table for device kinds without measurements."""
    return load(PACKAGED / DEFAULT)


def load(path: str | os.PathLike[str]) -> Table:
    """Reads and validates a file; raises the errors of `read`."""
    return read(path, _parse_table)


# ---------------------------------------------------------------------------------------------
# Conversion between JSON and Table

_MINIMA = ("min_word_bytes", "min_run_bytes", "min_total_bytes")


def _rule_text(rule: Rule) -> str:
    minima = dict(zip(_MINIMA, rule.minima, strict=True))
    return json.dumps({**minima, "candidates": rule.candidates})


def _parse_table(name: str, content: object) -> Table:
    keys = [field.name for field in dataclasses.fields(Table) if field.name != "name"]
    content = _object(content, keys, "the file")
    _check_provenance(content)
    peaks = content["peak_gb_per_s"]
    if not isinstance(peaks, dict):
        raise ValueError(f"peak_gb_per_s must be an object, got {peaks!r}")
    for direction, rate in peaks.items():
        _check_rate(rate, f"peak_gb_per_s.{direction}")
    rules = _object(content["rules"], COPY_KINDS, "rules")
    parsed = {name: _parse_rules(rules[name], f"rules.{name}") for name in COPY_KINDS}
    return Table(name=name, **{**content, "rules": parsed})


def _parse_rules(entries: object, where: str) -> tuple[Rule, ...]:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where} must be a list of at least one rule, got {entries!r}")
    rules = [_parse_rule(entry, f"{where}[{i}]") for i, entry in enumerate(entries)]
    if rules[0].minima != SMALLEST:
        wanted = ", ".join(
            f"{key} {minimum}" for key, minimum in zip(_MINIMA, SMALLEST, strict=True)
        )
        raise ValueError(f"{where}[0] must apply to every copy ({wanted}), got {entries[0]!r}")
    for i in range(1, len(rules)):
        if rules[i].minima <= rules[i - 1].minima:
            raise ValueError(f"{where}[{i}] must precede {where}[{i - 1}]: minima must ascend")
    return tuple(rules)


def _parse_rule(entry: object, where: str) -> Rule:
    entry = _object(entry, (*_MINIMA, "candidates"), where)
    for key, minimum in zip(_MINIMA, SMALLEST, strict=True):
        _check_int(entry[key], minimum, f"{where}.{key}")
    listed = entry["candidates"]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{where}.candidates must be a list of at least one, got {listed!r}")
    candidates = [_parse_candidate(c, f"{where}.candidates[{i}]") for i, c in enumerate(listed)]
    names = [candidate.implementation for candidate in candidates]
    if len({*names}) < len(names):
        raise ValueError(f"{where}.candidates: duplicate implementation in {names}")
    return Rule(CopySize(*(entry[key] for key in _MINIMA)), tuple(candidates))


def _parse_candidate(entry: object, where: str) -> Candidate:
    if not isinstance(entry, list) or len(entry) != 3:
        raise ValueError(f"{where} must be [implementation, num_sms, gb_per_s], got {entry!r}")
    implementation, num_sms, rate = entry
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"{where}: implementation must be one of {known}, got {implementation!r}")
    if implementation in ON_SMS:
        _check_int(num_sms, 1, f"{where}: num_sms of {implementation}", MOST_SMS)
    elif type(num_sms) is not int or num_sms != 0:
        raise ValueError(f"{where}: num_sms of {implementation} must be 0, got {num_sms!r}")
    if rate is not None:
        _check_rate(rate, f"{where}: gb_per_s, if not null,")
    return Candidate(implementation, num_sms, rate)
