"""Started swaps of one pair of trees, and their expected results."""

import random
from functools import partial
from typing import Any

import jax
import numpy as np

import jaxkv
from tests.util.block_trees import place, random_tree, swapped
from tests.util.layout_reference import assert_same_bytes
from tests.util.lowered_copies import Module
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

    def check(self, out, ids=IDS, src=None) -> None:
        """Compares the results of `finish`; `src` replaces the case's own source."""
        jaxkv.check_errors(out)
        want = swapped(self.src if src is None else src, self.dst, *ids)
        src, dst = out
        assert_trees_equal(dst, want)
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


CROSSINGS: dict[str, Any] = {
    "inner jit": lambda t: jax.jit(lambda t: (t.wait(0), t)[1])(t),
    "tree.map": lambda t: jax.tree.map(lambda leaf: leaf, t),
    "barrier": jax.lax.optimization_barrier,
    "scan": lambda t: jax.lax.scan(lambda t, _: (t, None), t, length=3)[0],
    "checkpoint": lambda t: jax.checkpoint(lambda t: (t.wait(0), t)[1])(t),
}


class SwapProgram:
    """A random program that starts a swap, and one that takes the handle of another program."""

    def __init__(self, case: SwapCase, named: Any, seed: int) -> None:
        self.case, self.named, self.random = case, named, random.Random(seed)
        self.overwrites_src = self.random.random() < 0.3
        self.donated = self.random.choice([(), (0,), (1,), (0, 1)])
        self.ops = [self.random.choice(("wait", "src", *CROSSINGS)) for _ in range(4)]
        self.arrays = [self.random.choice((None, 0, 1, 2)) for _ in self.ops]
        self.end = self.random.choice(("finish", "return", "drop"))

    def lowered(self) -> Module:
        def step(src: Any, dst: Any, *ids: Any) -> Any:
            swapping = jaxkv.start_swap(src, dst, *ids, implementation=self.named)
            rest = jax.tree.map(lambda a: a.at[:].set(0), src) if self.overwrites_src else None
            return self.use(swapping), rest

        args = *self.case.arrays(), *ids_for(self.named)
        return Module(jax.jit(step, donate_argnums=self.donated).lower(*args))

    def continued(self) -> Module:
        args = *self.case.arrays(), *ids_for(self.named)
        swapping = jax.eval_shape(self.case.begin(self.named), *args)
        lowered = jax.jit(self.use, donate_argnums=0).lower(swapping)
        module = Module(lowered)
        arrays = [*range(len(NAMES))] * (2 if self.case.to_host else 1)
        segments = [None, *([len(NAMES) - 1] if swapping._plan is not None else []), *arrays]
        kept = sorted(lowered._lowering.compile_args["kept_var_idx"])  # type: ignore[attr-defined]
        module.ticket = kept.index(0) if 0 in kept else None
        module.in_flight = [
            (i, s) for i, leaf in enumerate(kept) if (s := segments[leaf]) is not None
        ]
        return module

    def use(self, swapping: jaxkv.SwapHandle) -> Any:
        results: list[Any] = []
        for op, array in zip(self.ops, self.arrays, strict=True):
            if op in CROSSINGS:
                swapping = CROSSINGS[op](swapping)
            elif op == "wait":
                results.append(swapping.wait(array))
            elif self.case.to_host:
                results.append(swapping.src)
        if self.end == "finish":
            results.append(self.case.finish(swapping))
        return results, swapping if self.end == "return" else None
