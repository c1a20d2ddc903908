"""Random pytrees of blocks, and the NumPy reference of swap_blocks."""

import jax
import numpy as np

from tests.util.layout_reference import random_array
from tests.util.transfer_cases import put

BLOCKS = {"k": ((4, 2, 16), "bfloat16"), "scales": ((3,), "float32"), "bits": ((), "int8")}


def random_tree(num_blocks: int, blocks=BLOCKS, seed: int = 0) -> dict[str, np.ndarray]:
    """One array of random bytes per block shape and dtype."""
    rng = np.random.default_rng(seed)
    return {
        name: random_array(rng, (num_blocks, *shape), dtype)
        for name, (shape, dtype) in blocks.items()
    }


def place(tree, memory: str):
    """The tree as JAX arrays in one memory kind."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    return jax.tree.map(lambda array: put(array, sharding), tree)


def swapped(src, dst, src_ids, dst_ids):
    """The reference: `dst` with the copied blocks replaced, block by block."""
    out = jax.tree.map(np.copy, dst)
    for source, destination in zip(src_ids, dst_ids, strict=True):
        if source >= 0 and destination >= 0:
            for name, array in out.items():
                array[destination] = src[name][source]
    return out
