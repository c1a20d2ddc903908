"""Started swaps of one pair of trees, and their expected results."""

from functools import partial
from typing import Any

import jax
import numpy as np

import jaxkv
from tests.util.block_trees import place, random_tree, swapped
from tests.util.layout_reference import assert_same_bytes
from tests.util.transfer_cases import as_ids

MEMORIES = ("device", "pinned_host")
NAMES = ("a", "b", "c")
IDS = [3, -1, 0, 8, 5], [11, 2, -1, 0, 4]


class SwapCase:
    """Source and destination trees of three arrays with blocks of one size, in given memories."""

    def __init__(self, src_memory: str, dst_memory: str, dtype: str = "bfloat16", **sizes) -> None:
        blocks = {name: (sizes.get("shape", (4, 16)), dtype) for name in NAMES}
        self.src = random_tree(sizes.get("src_blocks", 9), blocks)
        self.dst = random_tree(sizes.get("dst_blocks", 12), blocks, seed=1)
        self.memories = src_memory, dst_memory
        self.to_host = dst_memory == "pinned_host"
        # The handle owns src only if dst is in host memory.
        self.donated = (0, 1) if self.to_host else (1,)

    def arrays(self):
        """New arrays of both sides."""
        trees = zip((self.src, self.dst), self.memories, strict=True)
        return [place(tree, memory) for tree, memory in trees]

    def start(self, ids=IDS, **options) -> Any:
        """`start_swap` outside of jit."""
        src, dst = self.arrays()
        return jaxkv.start_swap(src, dst, ids[0], ids[1], **options)

    def begin(self, named, **options) -> jax.stages.Wrapped:
        start = partial(jaxkv.start_swap, implementation=named, **options)
        return jax.jit(start, donate_argnums=self.donated)

    def finish(self, swapping: jaxkv.SwapHandle):
        """(src or None, dst) after all waits."""
        return (swapping.src if self.to_host else None), swapping.wait()

    def check(self, out, ids=IDS) -> None:
        jaxkv.check_errors(out)
        src, dst = out
        assert_trees_equal(dst, swapped(self.src, self.dst, *ids))
        assert {leaf.sharding.memory_kind for leaf in dst.values()} == {self.memories[1]}
        if src is not None:
            assert_trees_equal(src, self.src)
            assert {leaf.sharding.memory_kind for leaf in src.values()} == {self.memories[0]}


def ids_for(named: str | None, ids=IDS):
    return [as_ids(np.array(side, np.int32), named) for side in ids]


def assert_trees_equal(got, want) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_same_bytes(got[name], want[name], name)
