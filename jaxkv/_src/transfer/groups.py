"""Calls for several caches at once: dicts of pools, caches and ids with the same keys.

Any mapping counts as a dict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.transfer.ids import Ids

PoolOrGroups: TypeAlias = HostPool | Mapping[str, HostPool]
IdsOrGroups: TypeAlias = Ids | Mapping[str, Ids]
Layers: TypeAlias = int | Sequence[int] | None
LayersOrGroups: TypeAlias = Layers | Mapping[str, Layers]
TokensOrGroups: TypeAlias = range | Mapping[str, range | None] | None


def for_each_group(
    operation: str,
    state: dict[str, Any],
    ids: dict[str, Any],
    layers: Any,
    tokens: Any,
    call: Callable[[dict[str, Any], dict[str, Any], Any, Any], Any],
) -> dict[str, Any] | None:
    """The result of `call` for each group, or None if ids and pool are not dicts.

    Args:
      operation: name of the public function.
      state: the arguments with arrays, by name.
      ids: the id lists, by name.
      layers: a dict of the layers of groups, or None for all layers.
      tokens: a dict of the tokens of groups, or the tokens of all groups.
      call: the operation on the arguments of one group.

    Raises:
      TypeError: an argument is not a dict.
      ValueError: the keys of two arguments differ.
      Exception: of `call`, with a note that names the group.
    """
    arguments = {**ids, **state}
    dicts = [name for name, value in arguments.items() if isinstance(value, Mapping)]
    # Only a cache, or src and dst, may be a dict of arrays.
    grouped = [name for name in dicts if name in ids or name == "pool"]
    if not grouped:
        return None
    for name, value in arguments.items():
        if not isinstance(value, Mapping):
            raise TypeError(
                f"{operation}: {name} must be a dict of groups like {grouped[0]}, got "
                f"{'an array' if hasattr(value, 'dtype') else type(value).__name__}"
            )
    first, *others = arguments.items()
    for name, value in others:
        if set(value) != set(first[1]):
            raise ValueError(
                f"{operation}: {name} must have the groups of {first[0]}, {_sorted(first[1])}, "
                f"got {_sorted(value)}"
            )
    chosen = {} if layers is None else _of_groups(operation, "layers", layers, first[1])
    if not isinstance(tokens, Mapping):
        tokens = dict.fromkeys(first[1], tokens)
    tokens = _of_groups(operation, "tokens", tokens, first[1])
    results = {}
    for group in first[1]:
        with naming_group(operation, group):
            results[group] = call(
                {name: value[group] for name, value in state.items()},
                {name: value[group] for name, value in ids.items()},
                chosen.get(group),
                tokens.get(group),
            )
    return results


@contextlib.contextmanager
def naming_group(operation: str, group: str | None) -> Iterator[None]:
    """Adds a note that names the group to errors; None for a call without groups."""
    try:
        yield
    except Exception as error:
        if group is not None:
            error.add_note(f"{operation}: in group {group!r}")
        raise


def _sorted(groups: Mapping[Any, Any]) -> list[Any]:
    return sorted(groups, key=str)  # keys of several types have no order


def _of_groups(
    operation: str, name: str, value: Any, groups: Mapping[str, Any]
) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not set(value) <= set(groups):
        raise ValueError(
            f"{operation}: {name} must be a dict of some of the groups {_sorted(groups)}, got "
            f"{value!r}"
        )
    return value
