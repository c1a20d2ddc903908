"""JSON files of tuning tables: names, parsing and validation."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")
DEFAULT = "default.json"
ANY_DEVICE = "any"


def slug(device_kind: str) -> str:
    """The device kind as a file name, e.g. "nvidia_h200"."""
    return re.sub(r"\W+", "_", device_kind).strip("_").lower()


def read(path: str | os.PathLike[str], parse: Callable[[str, object], T]) -> T:
    """Result of `parse`, called with the name of a file and its JSON content.

    Raises:
      ValueError: an invalid file; the text has file, key and value.
      OSError: the file can't be read.
    """
    path = pathlib.Path(path)
    try:
        return parse(path.name, json.loads(path.read_text()))
    except ValueError as error:  # includes JSONDecodeError
        raise ValueError(f"tuning table {path}: {error}") from None


def _object(entry: object, keys: Collection[str], where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object, got {entry!r}")
    if missing := [key for key in keys if key not in entry]:
        raise ValueError(f"{where}: missing keys {', '.join(missing)}")
    if unknown := [key for key in entry if key not in keys]:
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}")
    return entry


def _check_int(value: object, minimum: int, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{where} must be an integer >= {minimum}, got {value!r}")
