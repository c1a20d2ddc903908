"""Tables of measured rates, one JSON file for each device kind, that `dispatch` decides by.

A table lists rules for each situation: "load" (from host memory), "store" (to host memory),
"device" (neither), and "overlapped" (transfers beside compute). Rules are sorted by their minima,
and the last one whose minima a copy reaches holds for it. Its candidates are implementations in
order of preference, each with the SMs to give it and its rate: the first that can serve the call
does. `python -m jaxkv.tune` writes a table; people review it.

Which table: the file named by the environment variable JAXKV_TUNING, else the packaged one for the
device kind, else `default.json`, which prefers what works everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, NamedTuple

from jaxkv._src.tuning.table_files import ANY_DEVICE, DEFAULT, _check_int, _object, read, slug

VARIABLE = "JAXKV_TUNING"
IMPLEMENTATIONS = ("dma", "kernel", "pallas", "host")
ON_SMS = ("kernel", "pallas")  # the others take no SM: their num_sms is 0
COPY_KINDS = ("load", "store", "device", "overlapped")
PACKAGED = pathlib.Path(__file__).parent / "data" / "copy"


class CopySize(NamedTuple):
    """What a rule looks at; as the minima of a rule, the least that it holds for.

    Attributes:
      word_bytes: the widest power of two, up to 16, that all addresses are a multiple of.
      run_bytes: bytes that lie together on both sides.
      total_bytes: payload of the call.
    """

    word_bytes: int
    run_bytes: int
    total_bytes: int

    def reaches(self, minima: CopySize) -> bool:
        return all(value >= least for value, least in zip(self, minima, strict=True))


SMALLEST = CopySize(1, 1, 0)  # minima of each situation's first rule, so that one always holds


class Candidate(NamedTuple):
    """An implementation, the SMs to give it, and its rate in GB/s (1e9) or None if not measured."""

    implementation: str
    num_sms: int
    gb_per_s: float | None = None

    @property
    def figures(self) -> str:
        """Rate and SMs in words, as far as there are any."""
        rate = [] if self.gb_per_s is None else [f"{self.gb_per_s:.4g} GB/s"]
        sms = [f"on {self.num_sms} SM{'s' if self.num_sms > 1 else ''}"] if self.num_sms else []
        return " ".join(rate + sms)


class Rule(NamedTuple):
    """Candidates, best first, for copies from `minima` on."""

    minima: CopySize
    candidates: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rules, and where they come from.

    Attributes:
      name: of the file, without its directory.
      device_kind: JAX's name of the device, or "any".
      how: what made the figures.
      commit: of jaxkv when they were measured, or None.
      date: ISO 8601, or None.
      versions: of the software that they were measured with.
      peak_gb_per_s: rate of one contiguous copy by direction, measured in the same run.
      rules: for each of `COPY_KINDS`, ascending.
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
        """The file, and what vouches for its figures."""
        if self.commit is None:
            return f"{self.name} ({self.how})"
        dirty = "-dirty" if self.commit.endswith("-dirty") else ""
        return f"{self.name} (commit {self.commit[:9]}{dirty})"

    def rule(self, situation: str, size: CopySize) -> Rule:
        """The rule that holds for a copy."""
        return last_matching_rule(self.rules[situation], size)

    def to_text(self) -> str:
        """The file's content: JSON, one line for each rule."""
        head = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("name", "rules")
        }
        lists = []
        for situation, rules in self.rules.items():
            lines = ",\n".join(f"   {_rule_text(rule)}" for rule in rules)
            lists.append(f'  "{situation}": [\n{lines}\n  ]')
        beginning = json.dumps(head, indent=1)[:-2]  # without the brace that ends it
        return f'{beginning},\n "rules": {{\n' + ",\n".join(lists) + "\n }\n}\n"


def last_matching_rule(rules: tuple[Rule, ...] | list[Rule], size: CopySize) -> Rule:
    """The last rule whose minima `size` reaches."""
    return next(rule for rule in reversed(rules) if size.reaches(rule.minima))


def table_for(device_kind: str) -> Table:
    """The table that holds for a device kind; see the module's text for which that is.

    Raises:
      ValueError: the file is no valid table, or JAXKV_TUNING names one for another device kind.
      OSError: the file that JAXKV_TUNING names can't be read.
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
    """The table that comes with jaxkv: that of the device kind, or else the default one."""
    path = PACKAGED / f"{slug(device_kind)}.json"
    return load(path) if path.exists() else default_table()


@functools.cache
def default_table() -> Table:
    """The table for device kinds that nobody has measured."""
    return load(PACKAGED / DEFAULT)


def load(path: str | os.PathLike[str]) -> Table:
    """Reads and checks a file; raises as `read`."""
    return read(path, _parse_table)


# ---------------------------------------------------------------------------------------------
# Between JSON and Table

_MINIMA = ("min_word_bytes", "min_run_bytes", "min_total_bytes")


def _rule_text(rule: Rule) -> str:
    minima = dict(zip(_MINIMA, rule.minima, strict=True))
    return json.dumps({**minima, "candidates": rule.candidates})


def _parse_table(name: str, content: Any) -> Table:
    keys = [field.name for field in dataclasses.fields(Table) if field.name != "name"]
    content = _object(content, keys, "the file")
    for key, kinds in (
        ("device_kind", (str,)),
        ("how", (str,)),
        ("commit", (str, type(None))),
        ("date", (str, type(None))),
        ("versions", (dict,)),
        ("peak_gb_per_s", (dict,)),
    ):
        if not isinstance(content[key], kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{key} must be {wanted}, got {content[key]!r}")
    rules = _object(content["rules"], COPY_KINDS, "rules")
    parsed = {name: _parse_rules(rules[name], f"rules.{name}") for name in COPY_KINDS}
    return Table(name=name, **{**content, "rules": parsed})


def _parse_rules(entries: Any, where: str) -> tuple[Rule, ...]:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where} must be a list of at least one rule, got {entries!r}")
    rules = [_parse_rule(entry, f"{where}[{i}]") for i, entry in enumerate(entries)]
    if rules[0].minima != SMALLEST:
        wanted = ", ".join(f"{key} {least}" for key, least in zip(_MINIMA, SMALLEST, strict=True))
        raise ValueError(f"{where}[0] must hold for every copy ({wanted}), got {entries[0]!r}")
    for i in range(1, len(rules)):
        if rules[i].minima <= rules[i - 1].minima:
            raise ValueError(f"{where}[{i}] must come before {where}[{i - 1}]: minima ascend")
    return tuple(rules)


def _parse_rule(entry: Any, where: str) -> Rule:
    entry = _object(entry, (*_MINIMA, "candidates"), where)
    for key, least in zip(_MINIMA, SMALLEST, strict=True):
        _check_int(entry[key], least, f"{where}.{key}")
    listed = entry["candidates"]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{where}.candidates must be a list of at least one, got {listed!r}")
    candidates = [_parse_candidate(c, f"{where}.candidates[{i}]") for i, c in enumerate(listed)]
    names = [candidate.implementation for candidate in candidates]
    if len({*names}) < len(names):
        raise ValueError(f"{where}.candidates must name an implementation once, got {names}")
    return Rule(CopySize(*(entry[key] for key in _MINIMA)), tuple(candidates))


def _parse_candidate(entry: Any, where: str) -> Candidate:
    if not isinstance(entry, list) or len(entry) != 3:
        raise ValueError(f"{where} must be [implementation, num_sms, gb_per_s], got {entry!r}")
    implementation, num_sms, rate = entry
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"{where}: implementation must be one of {known}, got {implementation!r}")
    if implementation in ON_SMS:
        _check_int(num_sms, 1, f"{where}: num_sms of {implementation}")
    elif num_sms != 0:
        raise ValueError(f"{where}: num_sms of {implementation} must be 0, got {num_sms!r}")
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (number and rate > 0):
        raise ValueError(f"{where}: gb_per_s must be null or a number above 0, got {rate!r}")
    return Candidate(implementation, num_sms, rate)
