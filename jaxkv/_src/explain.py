"""`jaxkv.explain`: the implementation of a call, with the reasons for its selection."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jaxkv._src.collectives import all_reduce
from jaxkv._src.transfer.dispatch import Selection, select_implementation
from jaxkv._src.transfer.resolve import _OPERATIONS, resolve


def explain(operation: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Explains the dispatch of `operation(*args, **options)`.

    Args:
      operation: `load_pages`, `store_pages`, `swap_blocks`, `start_load`, `start_store`, or
        `all_reduce`.
      *args, **options: its arguments; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      A text with the selected implementation, the reason against each of the others, and the
      tuning table that the figures come from.
    """
    if getattr(operation, "__name__", None) == "all_reduce":
        return all_reduce.explain(*args, **options)
    lines = [selection.text for selection in selections_of(operation, *args, **options)]
    return "\n".join(lines) or f"{operation.__name__}: nothing to copy"


def selections_of(operation: Callable[..., Any], *args: Any, **options: Any) -> list[Selection]:
    """The selection for each copy of `operation(*args, **options)`; arguments as for `explain`."""
    name = getattr(operation, "__name__", operation)
    if name not in _OPERATIONS:
        known = ", ".join((*_OPERATIONS, "all_reduce"))
        raise ValueError(f"operation must be one of {known}, got {name!r}")
    given = inspect.signature(operation).bind(*args, **options).arguments
    source_ids, destination_ids = (given.pop(argument) for argument in _OPERATIONS[name][0])
    layers, implementation = given.pop("layers", None), given.pop("implementation", None)
    first, second = list(given.values())[:2]  # in the order declared
    call = resolve(name, (first, second), (source_ids, destination_ids), layers)
    overlapped = name in ("start_load", "start_store")
    return [
        select_implementation(copy, call.ids, implementation, overlapped=overlapped)
        for copy in call.copies
    ]
