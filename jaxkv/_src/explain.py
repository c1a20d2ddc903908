"""Which implementation serves a call, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jaxkv._src.collectives import all_reduce
from jaxkv._src.transfer.dispatch import Selection, select_implementation
from jaxkv._src.transfer.resolve import _OPERATIONS, resolve


def explain(operation: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Says which implementation `operation(*args, **options)` takes and why not the others.

    Args:
      operation: `load_pages`, `store_pages`, `swap_blocks`, `start_load`, `start_store`, or
        `all_reduce`.
      *args, **options: its arguments; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      A line for the choice, one for each implementation that was not chosen, and the table that
      the figures come from.
    """
    if getattr(operation, "__name__", None) == "all_reduce":
        return all_reduce.explain(*args, **options)
    lines = [selection.text for selection in selections_of(operation, *args, **options)]
    return "\n".join(lines) or f"{operation.__name__}: nothing to copy"


def selections_of(operation: Callable[..., Any], *args: Any, **options: Any) -> list[Selection]:
    """What `operation(*args, **options)` takes for each of its copies; arguments as `explain`'s."""
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
