"""`jaxkv.explain`: the implementation of a call, with the reasons for its selection."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jaxkv._src.collectives import all_reduce
from jaxkv._src.transfer.async_calls import overlapped_copy
from jaxkv._src.transfer.dispatch import Selection, select_implementation
from jaxkv._src.transfer.groups import for_each_group
from jaxkv._src.transfer.merged_copies import MERGED
from jaxkv._src.transfer.resolve import _OPERATIONS, resolve

_STARTS = ("start_load", "start_store", "start_swap")


def explain(operation: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Explains the dispatch of `operation(*args, **options)`.

        print(jaxkv.explain(jaxkv.load_pages, pool, cache, host_pages, device_pages))

    Args:
      operation: `load_pages`, `store_pages`, `swap_blocks`, `start_load`, `start_store`,
        `start_swap`, or `all_reduce`.
      *args, **options: its arguments; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      A text with the selected implementation, the reason against each of the others, and the
      tuning table that the figures come from.

    Raises:
      TypeError: an argument is missing, unknown, or of another type.
      ValueError: `operation` is another function, or its arguments do not match.
      NotImplementedError: the requested implementation does not support the call.
    """
    if getattr(operation, "__name__", None) == "all_reduce":
        return all_reduce.explain(*args, **options)
    groups = selections_of_groups(operation, *args, **options)
    lines = [
        f"{group}: {selection.text}" if group else selection.text
        for group, selections in groups.items()
        for selection in selections
    ]
    merged = [
        selection.implementation
        for selections in groups.values()
        for selection in selections
        if selection.implementation in MERGED
    ]
    if len(merged) > 1 and operation.__name__ not in _STARTS:
        lines.append(f"{operation.__name__}: {len(merged)} copies by {merged[0]} in one call")
    return "\n".join(lines) or f"{operation.__name__}: nothing to copy"


def selections_of(operation: Callable[..., Any], *args: Any, **options: Any) -> list[Selection]:
    """The selection for each copy of `operation(*args, **options)`; arguments as for `explain`."""
    groups = selections_of_groups(operation, *args, **options)
    return [selection for selections in groups.values() for selection in selections]


def selections_of_groups(
    operation: Callable[..., Any], *args: Any, **options: Any
) -> dict[str, list[Selection]]:
    """The selections by group; the only key is "" without groups."""
    name = getattr(operation, "__name__", operation)
    if name not in _OPERATIONS:
        known = ", ".join((*_OPERATIONS, "all_reduce"))
        raise ValueError(f"operation must be one of {known}, got {name!r}")
    try:
        given = inspect.signature(operation).bind(*args, **options).arguments
    except TypeError as error:
        raise TypeError(f"explain: {name}: {error}; pass the arguments of the call") from error
    ids = {argument: given.pop(argument) for argument in _OPERATIONS[name][0]}
    layers, tokens = given.pop("layers", None), given.pop("tokens", None)
    implementation = given.pop("implementation", None)
    state = dict(list(given.items())[:2])  # in the order declared

    def select(
        state: dict[str, Any], ids: dict[str, Any], layers: Any, tokens: Any
    ) -> list[Selection]:
        first, second = state.values()
        source_ids, destination_ids = ids.values()
        call = resolve(name, (first, second), (source_ids, destination_ids), layers, tokens)
        in_flight = overlapped_copy(call.copies) if name in _STARTS and call.copies else None
        return [
            select_implementation(copy, call.ids, implementation, overlapped=i == in_flight)
            for i, copy in enumerate(call.copies)
        ]

    groups = for_each_group(name, state, ids, layers, tokens, select)
    return {"": select(state, ids, layers, tokens)} if groups is None else groups
