"""Caches of engines' own arrays, with a NumPy reference of loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jaxkv

# Number of layers, of pages of the cache, and of pages of the pool.
LAYERS, PAGES, HOST_PAGES = 3, 7, 10

BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
# The arrays of one layer, by engine: (shape of a page, dtype).
LAYER_ARRAYS: dict[str, Any] = {
    "fused": ((16, 4, 2, 32), BFLOAT16),  # tpu-inference, sglang-jax: [2 * heads / 2, 2, dim]
    "separate": {"k": ((16, 4, 32), BFLOAT16), "v": ((16, 4, 32), BFLOAT16)},
    "latent": (((16, 64), BFLOAT16), ((16, 8), BFLOAT16)),  # K dim != V dim
    "quantized": {
        "kv": ((16, 8, 32), FLOAT8),
        "scales": ((16, 8), np.dtype(np.float32)),
        "zero": ((3,), np.dtype(np.int8)),  # an odd size
    },
    "recurrent": (((5, 24), np.dtype(np.float32)), ((6,), np.dtype(np.float32))),
}


def _is_page(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], np.dtype)


def random_arrays(form: str, *, stacked: bool, pages: int = PAGES, seed: int = 0) -> Any:
    """A cache of random bytes as NumPy arrays."""
    rng = np.random.default_rng(seed)

    def layer() -> Any:
        return jax.tree.map(
            lambda page: _random(rng, (pages, *page[0]), page[1]),
            LAYER_ARRAYS[form],
            is_leaf=_is_page,
        )

    layers = [layer() for _ in range(LAYERS)]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *layers) if stacked else layers


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


def by_page(array: Any, stacked: bool) -> np.ndarray:
    """The bytes of an array as [pages, ...]."""
    array = np.asarray(array)
    if stacked:
        array = array.swapaxes(0, 1)
    return np.ascontiguousarray(array).reshape(array.shape[0], -1).view(np.uint8)


def assert_pages(
    got: Any, want: Callable[[np.ndarray, np.ndarray], np.ndarray], *old: Any, stacked: bool
) -> None:
    """Compares each array with `want` of the bytes of the same arrays in `old`."""
    for arrays in zip(*map(jax.tree.leaves, (got, *old)), strict=True):
        pages = [by_page(array, stacked) for array in arrays]
        np.testing.assert_array_equal(pages[0], want(*pages[1:]))


def stored_pool(form: str, layout: Any, stacked: bool, seed: int = 1) -> tuple[Any, Any]:
    """A pool filled by `store_pages`, and the arrays of its pages."""
    arrays = random_arrays(form, stacked=stacked, pages=HOST_PAGES, seed=seed)
    spec = jaxkv.ArrayCacheSpec.from_arrays(jax.device_put(arrays), stacked=stacked)
    pool = jaxkv.HostPool.create(spec, num_pages=HOST_PAGES, layout=layout)
    every = np.arange(HOST_PAGES, dtype=np.int32)
    store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
    return store(pool, jax.device_put(arrays), every, every), arrays
