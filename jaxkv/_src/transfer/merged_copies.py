"""The FFI call of several copies: the groups of a call, and the block sizes of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxkv._src.transfer.block_copy import (
    BlockCopy,
    _copy_attribute,
    _id_operands,
    copy_blocks,
    result_types,
)
from jaxkv._src.transfer.ids import IdPair
from jaxkv._src.transfer.memory_kinds import check_host_results
from jaxkv._src.tuning.copy_table import Implementation

TARGET = "jaxkv_copy_groups"
# The implementations whose copies share a call.
MERGED: tuple[Implementation, ...] = ("kernel", "host")


@dataclasses.dataclass(frozen=True)
class GroupCopy:
    """A copy of a group.

    Attributes:
      copy: the buffers to copy. Copies of a group may write the same array.
      group: number of the group; its copies have the same ids.
      ids: source and destination ids.
      pairs: result of `plan_pairs`, or None for a copy that checks its ids itself.
      implementation: one of `MERGED`.
      num_sms: SM limit; 0 if it uses none.
    """

    copy: BlockCopy
    group: int
    ids: IdPair
    pairs: jax.Array | None
    implementation: Implementation
    num_sms: int


def copy_merged(copies: Sequence[GroupCopy]) -> list[list[jax.Array]]:
    """Traces several copies as one call; returns the written arrays of each."""
    if len(copies) == 1:
        (only,) = copies
        name, num_sms = only.implementation, only.num_sms
        return [copy_blocks(only.copy, only.ids, only.pairs, name, num_sms)]
    ids, read, written = _Operands(), _Operands(), _Operands()
    places: list[tuple[GroupCopy, bool, int, int, int]] = []
    for entry in copies:
        copy = entry.copy
        sources = copy.strided if copy.to_dense else copy.dense
        new_ids = entry.group not in (other.group for other, *_ in places)
        id_arrays = _id_operands(entry.ids) if entry.pairs is None else [entry.pairs]
        places.append(
            (
                entry,
                new_ids,
                ids.add(id_arrays, (entry.group,)),
                read.add(sources, tuple(map(id, sources))),
                written.add(
                    copy.written, (entry.group, *map(id, copy.written)), result_types(copy)
                ),
            )
        )
    first_read = len(ids.arrays)
    first_written = first_read + len(read.arrays)
    attribute: list[int] = []
    for entry, new_ids, first_id, from_place, to_place in places:
        sides = first_read + from_place, first_written + to_place
        strided, dense = sides if entry.copy.to_dense else sides[::-1]
        numbers = _copy_attribute(entry.copy, entry.ids, entry.num_sms)
        second_id = first_id + 1 if entry.pairs is None else -1
        attribute += [len(numbers), first_id, second_id, new_ids]
        attribute += [strided, len(entry.copy.strided), dense, *numbers]
    check_host_results(copies[0].copy.operation, written.types)
    call = jax.ffi.ffi_call(
        TARGET,
        written.types,
        input_output_aliases={first_written + i: i for i in range(len(written.arrays))},
    )
    operands = [*ids.arrays, *read.arrays, *written.arrays]
    results = call(*operands, copies=np.array(attribute, np.int64))
    return [list(results[place : place + len(entry.copy.written)]) for entry, *_, place in places]


class _Operands:
    """Lists of operands, each of which is passed once."""

    def __init__(self) -> None:
        self.arrays: list[jax.Array] = []
        self.types: list[jax.core.ShapedArray] = []
        self._places: dict[tuple[int, ...], int] = {}

    def add(
        self,
        arrays: Sequence[jax.Array],
        key: tuple[int, ...],
        types: Sequence[jax.core.ShapedArray] = (),
    ) -> int:
        """Adds arrays, unless the key was added before; returns the place of the first."""
        if key not in self._places:
            self._places[key] = len(self.arrays)
            self.arrays += arrays
            self.types += types
        return self._places[key]
