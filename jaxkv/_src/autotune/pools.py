"""Arrays of blocks as large as those of an engine, for measurements of copies.

Blocks of a small array share pages of the TLBs and rows of DRAM that those of a large one do not.
Pinned memory takes seconds to create, so all arrays in host memory are views of the same pages.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.cache import host_memory, pinned_memory

GIB = 1 << 30
WANTED_BYTES = 32 * GIB
TILE_BYTES = 67_108_748  # no multiple of a block, so that no two blocks are equal
FILLERS = 8
SAMPLED, COMPARED_BYTES = 1024, 16 << 20


def pool_bytes(at_least: int, number: int = 1) -> int:
    """Bytes of a pool: at most 32 GiB, half of the free host memory, two thirds of the free HBM.

    Args:
      at_least: lower limit, and the result without a GPU; twice the copied blocks will do.
      number: of pools, and of arrays in HBM, that share the free memory.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform == "gpu" else None
    if not stats or "bytes_limit" not in stats:
        return at_least
    in_hbm = (stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * 2 // 3
    _, on_host = host_memory.least_available()
    return max(at_least, min(WANTED_BYTES, in_hbm // number, on_host // 2 // number))


class Pools:
    """Pinned memory with random contents, and arrays of blocks of any size.

    At any time only one array in host memory may be written: all are the same pages.

    Attributes:
      num_bytes: bytes of each array, or a few less.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self._view = pinned_memory.views(num_bytes, jax.local_devices()[0])
        self._fill()

    def _fill(self) -> None:
        tile = np.random.default_rng(0).integers(0, 256, min(TILE_BYTES, self.num_bytes), np.uint8)
        whole = _bytes_of(self.host(1, np.uint8))

        def copy(begin: int) -> None:
            part = whole[begin : begin + len(tile)]
            part[:] = tile[: len(part)]

        with ThreadPoolExecutor(FILLERS) as pool:
            list(pool.map(copy, range(0, self.num_bytes, len(tile))))

    def host(self, block_bytes: int, dtype: np.typing.DTypeLike | None = None) -> jax.Array:
        """`dtype[num_blocks, words]` in pinned memory: a view, with the present contents."""
        kind = np.dtype(dtype or _word(block_bytes))
        shape = self.num_bytes // block_bytes, block_bytes // kind.itemsize
        return self._view(shape, kind)

    def device(self, block_bytes: int, *, num_bytes: int | None = None, seed: int = 0) -> jax.Array:
        """`dtype[num_blocks, words]` in device memory: a new array with pseudo-random contents."""
        dtype = _word(block_bytes)
        shape = (num_bytes or self.num_bytes) // block_bytes, block_bytes // dtype.itemsize
        return _noise(shape, dtype, seed)


def _word(block_bytes: int) -> np.dtype:
    return np.dtype({1: np.int8, 2: np.int16, 4: np.int32}[math.gcd(4, block_bytes)])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _noise(shape: tuple[int, int], dtype: np.dtype, seed: int) -> jax.Array:
    """A hash of row, column and seed: without temporaries, and of more than 2**32 elements."""
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    x = row * jnp.uint32(2654435761) + column * jnp.uint32(40503) + jnp.uint32(seed)
    for factor in (0x2C1B3C6D, 0x297A2D39):
        x = (x ^ (x >> 15)) * jnp.uint32(factor)
    return (x ^ (x >> 15)).astype(dtype)


def _bytes_of(array: jax.Array) -> np.ndarray:
    """The memory of an array in host memory, without a copy."""
    pointer = array.unsafe_buffer_pointer()
    return np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(pointer))


def rows(array: jax.Array, ids: np.ndarray) -> np.ndarray:
    """The blocks `ids` of an array in either memory."""
    jax.block_until_ready(array)
    if array.sharding.memory_kind == pinned_memory.PINNED:
        return _bytes_of(array).view(array.dtype).reshape(array.shape)[ids]
    return np.asarray(array[jnp.asarray(ids)])


def write(array: jax.Array, ids: np.ndarray, values: np.ndarray) -> jax.Array:
    """The array with other values in the blocks `ids`, in place as if donated."""
    jax.block_until_ready(array)
    if array.sharding.memory_kind == pinned_memory.PINNED:
        _bytes_of(array).view(array.dtype).reshape(array.shape)[ids] = values
        return array
    return _write_on_device(array, ids, values)


@functools.partial(jax.jit, donate_argnums=0)
def _write_on_device(array: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[ids].set(values)


def verified(
    copy: Callable[[jax.Array], jax.Array],
    source: jax.Array,
    destination: jax.Array,
    ids: list[tuple[np.ndarray, np.ndarray]],
) -> jax.Array:
    """The destination of the copies `ids` after `copy(destination)`, which are compared.

    The written blocks, which differ before the copy, must equal the source; their neighbours, and a
    sample of the others, must be as before. Of the written blocks, up to 16 MiB are compared.

    Raises:
      AssertionError: a block is wrong.
    """
    pairs: dict[int, int] = {}
    for from_, to in ids:  # later copies overwrite earlier ones
        pairs |= dict(zip(to.tolist(), from_.tolist(), strict=True))
    written, read = (np.fromiter(side, np.int32, len(pairs)) for side in (pairs, pairs.values()))
    at_most = max(1, COMPARED_BYTES // (destination.nbytes // len(destination)))
    chosen = np.random.default_rng(2).permutation(len(written))[:at_most]
    others = _others(written, written[chosen], len(destination), min(SAMPLED, at_most))
    written, read = written[chosen], read[chosen]
    wanted = np.concatenate([rows(source, read), rows(destination, others)])
    destination = write(destination, written, ~wanted[: len(written)])
    destination = copy(destination)
    compared = np.concatenate([written, others])
    wrong = compared[(rows(destination, compared) != wanted).any(axis=1)]
    if len(wrong):
        raise AssertionError(f"{len(np.unique(wrong))} blocks are wrong")
    return destination


def _others(written: np.ndarray, compared: np.ndarray, num_blocks: int, sampled: int) -> np.ndarray:
    """Neighbours of the compared blocks, and a sample of all, without the written ones.

    Repeated so that their number only depends on that of the compared ones: programs compile by
    shape.
    """
    beside = np.concatenate([compared - 1, compared + 1])
    sample = np.random.default_rng(1).integers(0, num_blocks, sampled, np.int32)
    found = (np.setdiff1d(each, written) for each in (beside, sample))
    inside = ((each[(each >= 0) & (each < num_blocks)]) for each in found)
    sizes = 2 * len(compared), sampled
    return np.concatenate(
        [np.resize(each, size * bool(len(each))) for each, size in zip(inside, sizes, strict=True)]
    )
