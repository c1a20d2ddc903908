"""JSON files of tuning tables: names, parsing and validation."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")
MOST_BYTES = 1 << 20  # of a file
MOST_GB_PER_S = 10**6  # no memory is as fast
DEFAULT = "default.json"
ANY_DEVICE = "any"


def slug(device_kind: str) -> str:
    """The device kind as a file name, e.g. "nvidia_h200"."""
    return re.sub(r"\W+", "_", device_kind).strip("_").lower()


def output_path(out: str | os.PathLike[str] | None, name: str) -> pathlib.Path:
    """Where to write a table: `out`, or the file `name` in it if it is a folder.

    Raises:
      FileNotFoundError: the folder does not exist; checked before the measurement, not after it.
    """
    path = pathlib.Path(out or ".")
    path = path / name if path.is_dir() else path
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {path.parent}")
    return path


def read(path: str | os.PathLike[str], parse: Callable[[str, object], T]) -> T:
    """Result of `parse`, called with the name of a file and its JSON content.

    Raises:
      ValueError: an invalid file; the text has file, key and value.
      OSError: the file can't be read.
    """
    path = pathlib.Path(path)
    try:
        if path.exists() and not path.is_file():  # reading a FIFO would block
            raise ValueError("must be a regular file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes exceed the limit of {MOST_BYTES} bytes")
        return parse(path.name, json.loads(path.read_text()))
    except (ValueError, RecursionError) as error:  # includes JSONDecodeError
        raise ValueError(f"tuning table {path}: {error}") from None


def _object(
    entry: object, keys: Collection[str], where: str, optional: Collection[str] = ()
) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object, got {entry!r}")
    if missing := [key for key in keys if key not in entry]:
        raise ValueError(f"{where}: missing keys {', '.join(missing)}")
    if unknown := [key for key in entry if key not in (*keys, *optional)]:
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}")
    return entry


def _check_int(value: object, minimum: int, where: str, maximum: int = 2**63 - 1) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{where} must be an integer in [{minimum}, {maximum}], got {value!r}")


def _check_rate(value: object, where: str) -> None:
    if type(value) not in (int, float) or not 0 < value <= MOST_GB_PER_S:  # type: ignore[operator]
        raise ValueError(f"{where} must be a number in (0, {MOST_GB_PER_S}], got {value!r}")


def _check_provenance(content: dict[str, Any]) -> None:
    """Checks the entries of a file other than its rules."""
    for key, kinds in (
        ("device_kind", (str,)),
        ("how", (str,)),
        ("commit", (str, type(None))),
        ("date", (str, type(None))),
        ("versions", (dict,)),
    ):
        if not isinstance(content[key], kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{key} must be {wanted}, got {content[key]!r}")
