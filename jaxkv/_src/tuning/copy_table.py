"""Tuning tables of copies: measured rates for `dispatch`, one JSON file for each device kind.

A table lists rules for each kind of copy: "load" (from host memory), "store" (to host memory),
"device" (neither), and "overlapped" (transfers concurrent with compute). Rules are sorted by their
minima; the last rule whose minima a copy reaches applies. Its candidates are implementations in
order of preference, each with a number of SMs and a measured rate; dispatch selects the first one
that supports the call. A rule applies to copies of many sizes, but its rates are of the one in
"measured_size"; tables without that key are valid, and their rates only rank. `python -m
jaxkv.tune` writes a table, to be reviewed by hand. `copy_lookup` selects the table of a device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from jaxkv._src.runtime.pcie import LANE_MB_PER_S
from jaxkv._src.tuning.hardware import Hardware
from jaxkv._src.tuning.table_files import (
    _check_int,
    _check_provenance,
    _check_rate,
    _object,
    read,
)

Implementation: TypeAlias = Literal["dma", "kernel", "pallas", "host", "xla"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
ON_SMS: tuple[Implementation, ...] = ("kernel", "pallas")  # the others use no SMs: num_sms is 0
MOST_SMS = 4096  # of a rule; no GPU has as many
MOST_LANES = 32  # of a PCIe link
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

    @property
    def runs_text(self) -> str:
        """Number and bytes of the runs."""
        return f"{self.total_bytes // self.run_bytes} x {self.run_bytes} bytes"


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
    """Candidates, best first, for copies that reach `minima`.

    Attributes:
      minima: of the copies to which the rule applies.
      candidates: best first.
      measured: size of the copies with the rates of the candidates, or None if unknown.
    """

    minima: CopySize
    candidates: tuple[Candidate, ...]
    measured: CopySize | None = None


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
      hardware: the GPU of the measurement, or None.
      peak_gb_per_s: rate of one contiguous copy by direction, measured in the same run.
      rules: rules in ascending order, for each of `COPY_KINDS`.
    """

    name: str
    device_kind: str
    how: str
    commit: str | None
    date: str | None
    versions: dict[str, str]
    hardware: Hardware | None
    peak_gb_per_s: dict[str, float]
    rules: dict[str, tuple[Rule, ...]]

    @property
    def source(self) -> str:
        """The file name, and the commit or method behind its figures."""
        if self.commit is None:
            return f"{self.name} ({self.how})"
        dirty = "-dirty" if self.commit.endswith("-dirty") else ""
        return f"{self.name} (commit {self.commit[:9]}{dirty})"

    @property
    def head(self) -> dict[str, Any]:
        """Everything but the rules."""
        head = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "rules"
        }
        return {**head, "hardware": self.hardware and self.hardware._asdict()}

    def rule(self, copy_kind: str, size: CopySize) -> Rule:
        """The rule that applies to a copy."""
        return last_matching_rule(self.rules[copy_kind], size)

    def to_text(self) -> str:
        """The file's content: JSON, one line for each rule."""
        head = {key: value for key, value in self.head.items() if key != "name"}
        lists = []
        for copy_kind, rules in self.rules.items():
            lines = ",\n".join(f"   {_rule_text(rule)}" for rule in rules)
            lists.append(f'  "{copy_kind}": [\n{lines}\n  ]')
        beginning = json.dumps(head, indent=1)[:-2]  # without the closing brace
        return f'{beginning},\n "rules": {{\n' + ",\n".join(lists) + "\n }\n}\n"


def last_matching_rule(rules: tuple[Rule, ...] | list[Rule], size: CopySize) -> Rule:
    """The last rule whose minima `size` reaches."""
    return next(rule for rule in reversed(rules) if size.reaches(rule.minima))


def load(path: str | os.PathLike[str]) -> Table:
    """Reads and validates a file; raises the errors of `read`."""
    return read(path, _parse_table)


# ---------------------------------------------------------------------------------------------
# Conversion between JSON and Table

_MINIMA = ("min_word_bytes", "min_run_bytes", "min_total_bytes")
_MEASURED = "measured_size"


def _rule_text(rule: Rule) -> str:
    minima = dict(zip(_MINIMA, rule.minima, strict=True))
    measured = {} if rule.measured is None else {_MEASURED: rule.measured}
    return json.dumps({**minima, **measured, "candidates": rule.candidates})


def _parse_table(name: str, content: object) -> Table:
    keys = [field.name for field in dataclasses.fields(Table) if field.name != "name"]
    content = _object(content, keys, "the file")
    _check_provenance(content)
    hardware = _parse_hardware(content["hardware"])
    peaks = content["peak_gb_per_s"]
    if not isinstance(peaks, dict):
        raise ValueError(f"peak_gb_per_s must be an object, got {peaks!r}")
    for direction, rate in peaks.items():
        _check_rate(rate, f"peak_gb_per_s.{direction}")
    rules = _object(content["rules"], COPY_KINDS, "rules")
    parsed = {name: _parse_rules(rules[name], f"rules.{name}") for name in COPY_KINDS}
    return Table(name=name, **{**content, "hardware": hardware, "rules": parsed})


def _parse_hardware(entry: object) -> Hardware | None:
    if entry is None:
        return None
    entry = _object(entry, Hardware._fields, "hardware")
    capability = entry["compute_capability"]
    if not isinstance(capability, str) or not re.fullmatch(r"\d+\.\d+", capability):
        raise ValueError(
            f'hardware.compute_capability must be a string such as "9.0", got {capability!r}'
        )
    _check_int(entry["num_sms"], 1, "hardware.num_sms", MOST_SMS)
    link = entry["pcie_generation"], entry["pcie_lanes"]
    if link != (None, None):
        _check_int(link[0], 1, "hardware.pcie_generation", max(LANE_MB_PER_S))
        _check_int(link[1], 1, "hardware.pcie_lanes", MOST_LANES)
    return Hardware(**entry)


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
    entry = _object(entry, (*_MINIMA, "candidates"), where, optional=(_MEASURED,))
    for key, minimum in zip(_MINIMA, SMALLEST, strict=True):
        _check_int(entry[key], minimum, f"{where}.{key}")
    listed = entry["candidates"]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{where}.candidates must be a list of at least one, got {listed!r}")
    candidates = [_parse_candidate(c, f"{where}.candidates[{i}]") for i, c in enumerate(listed)]
    names = [candidate.implementation for candidate in candidates]
    if len({*names}) < len(names):
        raise ValueError(f"{where}.candidates: duplicate implementation in {names}")
    minima = CopySize(*(entry[key] for key in _MINIMA))
    measured = _parse_measured(entry[_MEASURED], where) if _MEASURED in entry else None
    return Rule(minima, tuple(candidates), measured)


def _parse_measured(entry: object, where: str) -> CopySize:
    if not isinstance(entry, list) or len(entry) != len(SMALLEST):
        names = ", ".join(CopySize._fields)
        raise ValueError(f"{where}.{_MEASURED} must be [{names}], got {entry!r}")
    for name, value in zip(CopySize._fields, entry, strict=True):
        _check_int(value, 1, f"{where}.{_MEASURED}: {name}")
    return CopySize(*entry)


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
