"""Copies by the Pallas kernels between arrays of any size, and their checks."""

import dataclasses
from functools import partial

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxkv._src.transfer.block_copy import BlockCopy
from jaxkv._src.transfer.pallas_copy import copy_blocks_pallas
from jaxkv._src.transfer.resolve import resolve
from tests.util.layout_reference import assert_same_bytes, random_array
from tests.util.transfer_cases import pointers, put

BLOCKS = 9, 12  # of the source and of the destination
PAIRS = [(8, 11), (0, 2), (3, 0), (5, 4), (1, 1)]  # source and destination blocks
UNUSED = [7, 7] * 3


def plan(pairs) -> np.ndarray:
    """The pairs in the kernel's format, with entries after their end that must be ignored."""
    words = [len(pairs), -1, *np.array(pairs, np.int32).reshape(-1), *UNUSED]
    return np.array(words, np.int32)


def turned(copy: BlockCopy) -> BlockCopy:
    """The same copy with the sources as the dense side."""
    return dataclasses.replace(
        copy,
        to_dense=False,
        dense=copy.strided,
        strided=copy.dense,
        num_dense=copy.num_strided,
        num_strided=copy.num_dense,
    )


def swap_arrays(sources, destinations, pairs, *, to_dense: bool = True, **options):
    """The written arrays, with one launch for all arrays; to be jitted."""
    ids = np.zeros(1, np.int32)
    call = resolve("swap_blocks", (sources, destinations), (ids, ids), None)
    copies = call.copies if to_dense else [turned(copy) for copy in call.copies]
    results = [[jax.typeof(array) for array in copy.written] for copy in copies]
    return call.rebuild(copy_blocks_pallas(copies, pairs, results, **options))


def check_swap(
    shapes,
    pairs=PAIRS,
    to_dense: bool = True,
    memories=("device", "device"),
    blocks=BLOCKS,
    **options,
) -> list[jax.Array]:
    """Copies between arrays of these block shapes and dtypes; compares every byte."""
    rng = np.random.default_rng(0)
    host = [[random_array(rng, (n, *shape), dtype) for shape, dtype in shapes] for n in blocks]
    device = jax.devices()[0]
    placed = [
        [put(array, SingleDeviceSharding(device, memory_kind=memory)) for array in arrays]
        for arrays, memory in zip(host, memories, strict=True)
    ]
    before = pointers(placed[1])
    step = jax.jit(partial(swap_arrays, to_dense=to_dense, **options), donate_argnums=1)
    got = step(*placed, plan(pairs))
    for source, destination, array in zip(*host, got, strict=True):
        for from_block, to_block in pairs:
            destination[to_block] = source[from_block]
        assert_same_bytes(array, destination, "destination")
    for array, source in zip(placed[0], host[0], strict=True):
        assert_same_bytes(array, source, "source")
    assert {array.sharding.memory_kind for array in got} == {memories[1]}
    assert pointers(got) == before
    return got


def words(num_words: int):
    return ((num_words,), "int32")


def host_sharding() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
