"""Random copies of pages and blocks: synchronous, started, of some tokens or layers."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from tests.util.async_cases import OVERLAPPED, finish, start
from tests.util.block_trees import place, random_tree, swapped
from tests.util.layout_reference import DTYPES, KIND_LAYOUTS, assert_same_bytes
from tests.util.transfer_cases import Case, after, donating, make_case

MEMORIES = ("device", "pinned_host")
COUNTS = (1, 4, 7)  # of ids, each compiled once
# Runs with the same arrays. On an H100 (jax 0.11.2) each run of a load left about 1 KiB of XLA's
# records and CUDA events in the heap until its arrays were deleted: memory grew without new ones.
RENEWED = 32
SELECTIONS: tuple[Any, ...] = (None, 1, range(2), np.int32(0), range(1, 3))


def random_ids(rng: np.random.Generator, count: int, sources: int, destinations: int) -> Any:
    """Source ids, with repetitions, and distinct destinations; a fifth of the pairs are padding."""
    source = rng.integers(0, sources, count).astype(np.int32)
    destination = rng.permutation(destinations)[:count].astype(np.int32)
    for side in (source, destination):
        padding = rng.random(count) < 0.1
        side[padding] = rng.integers(-(2**31), 0, padding.sum())
    return source, destination


def in_form(number: int, named: str | None, ids: Any) -> Any:
    """Both id lists in one of the forms that the implementation takes."""
    forms: list[Callable[[], Any]] = [
        lambda: tuple(jaxkv.HostIdPair(*ids)),
        lambda: tuple(map(jaxkv.HostIds, ids)),
        lambda: tuple(map(jnp.asarray, ids)),
    ]
    return forms[number % (2 if named == "dma" else 3)]()


class Pages:
    """A pool and a cache of one layout, copied again and again, beside their reference."""

    def __init__(self, number: int, direction: str, *, started: bool, tokens: bool) -> None:
        kind, layout = KIND_LAYOUTS[number % len(KIND_LAYOUTS)]
        sizes: dict[str, Any] = {"page_size": 4, "head_dim": 6 + number % 3}
        if layout == "page_unified" and kind == "mha":
            sizes |= {"num_kv_heads": 4, "head_groups": 2}
        dtype = DTYPES[number % len(DTYPES)]
        self.case = make_case(layout, kind=kind, dtype=dtype, seed=number, **sizes)
        self.direction, self.count = direction, COUNTS[number % len(COUNTS)]
        self.form, named = divmod(number, len(OVERLAPPED))
        self.named = OVERLAPPED[named]
        self.layers = SELECTIONS[number % len(SELECTIONS)]
        self.tokens = range(number % 3, 3 + number % 2) if tokens else None
        options = {"layers": self.layers, "tokens": self.tokens, "implementation": self.named}
        self.step = self._started(options) if started else donating(direction, **options)
        self.pool: Any = None
        self.cache: Any = None
        self.runs = 0

    def _started(self, options: dict[str, Any]) -> Any:
        def step(pool: Any, cache: Any, *ids: Any) -> Any:
            handle = start(self.direction, pool, cache, *ids, **options)
            new_pool, new_cache = finish(self.direction, handle)
            return new_cache if self.direction == "load" else (new_pool, new_cache)

        return jax.jit(step, donate_argnums=1 if self.direction == "load" else (0, 1))

    def run(self, rng: np.random.Generator) -> None:
        case, pages = self.case, (self.case.layout.num_pages, self.case.num_device_pages)
        if self.runs % RENEWED == 0:
            self.pool, self.cache = case.pool(), case.cache()
        self.runs += 1
        if self.direction == "load":
            ids = random_ids(rng, self.count, *pages)
        else:
            ids = random_ids(rng, self.count, *pages[::-1])[::-1]
        out = self.step(self.pool, self.cache, *in_form(self.form, self.named, ids))
        if isinstance(out, tuple):
            self.pool, self.cache = out
        else:
            self.pool, self.cache = after(self.direction, out, self.pool, self.cache)
        jaxkv.check_errors(out)
        want = case.expected(self.direction, ids[0], ids[1], self.layers, self.tokens)
        self.case = Case(case.layout, want.get("host", case.host), want.get("device", case.device))
        self.case.assert_holds(jax.tree.map(_copied, self.pool), self.cache)


class Blocks:
    """Two trees of arrays in given memories, swapped again and again."""

    def __init__(self, number: int, *, started: bool) -> None:
        self.memories = MEMORIES[number % 2], MEMORIES[number // 2 % 2]
        self.count = COUNTS[number % 3]
        self.form, named = divmod(number // 4, len(OVERLAPPED))
        self.named: Any = OVERLAPPED[named]
        # All arrays of a started swap have blocks of one size.
        blocks = {"a": ((4, 2, 3), "bfloat16"), "b": ((12, 2), "int8"), "c": ((3,), "float32")}
        if started:
            blocks = {name: ((5 + number, 2), "bfloat16") for name in "abc"}
        self.src, self.dst = random_tree(9, blocks), random_tree(12, blocks, seed=1)
        self.arrays: list[Any] = []
        self.runs = 0
        owns_src = started and self.memories[1] == "pinned_host"

        def step(src: Any, dst: Any, *ids: Any) -> Any:
            if not started:
                return src, jaxkv.swap_blocks(src, dst, *ids, implementation=self.named)
            swapping = jaxkv.start_swap(src, dst, *ids, implementation=self.named)
            return (swapping.src if owns_src else src), swapping.wait()

        self.owns_src = owns_src
        self.step = jax.jit(
            step if owns_src else lambda *args: step(*args)[1],
            donate_argnums=(0, 1) if owns_src else (1,),
        )

    def run(self, rng: np.random.Generator) -> None:
        if self.runs % RENEWED == 0:
            trees = zip((self.src, self.dst), self.memories, strict=True)
            self.arrays = [place(tree, memory) for tree, memory in trees]
        self.runs += 1
        ids = random_ids(rng, self.count, 9, 12)
        out = self.step(*self.arrays, *in_form(self.form, self.named, ids))
        self.arrays = [*out] if self.owns_src else [self.arrays[0], out]
        jaxkv.check_errors(out)
        self.dst = swapped(self.src, self.dst, *ids)
        for tree, arrays in zip((self.src, self.dst), self.arrays, strict=True):
            for name, want in tree.items():
                assert_same_bytes(_copied(arrays[name]), want, name)


def _copied(array: jax.Array) -> jax.Array:
    """In device memory: an array in host memory of which NumPy has a view can't be donated."""
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


def _repeated(rng: np.random.Generator, kinds: list[Callable[[], Any]]) -> Iterator[None]:
    """One case after another, each of a random kind, which is created when it is first drawn.

    After a failure a kind is created anew, because its reference no longer applies.
    """
    made: dict[int, Any] = {}
    while True:
        number = int(rng.integers(len(kinds)))
        if number not in made:
            made[number] = kinds[number]()
        one = made.pop(number)
        one.run(rng)
        made[number] = one
        yield


def pages(
    direction: str, *, started: bool = False, tokens: bool = False
) -> Callable[[np.random.Generator], Iterator[None]]:
    def cases(rng: np.random.Generator) -> Iterator[None]:
        make = lambda number: lambda: Pages(number, direction, started=started, tokens=tokens)  # noqa: E731
        return _repeated(rng, [make(number) for number in range(len(KIND_LAYOUTS))])

    return cases


def blocks(*, started: bool = False) -> Callable[[np.random.Generator], Iterator[None]]:
    def cases(rng: np.random.Generator) -> Iterator[None]:
        make = lambda number: lambda: Blocks(number, started=started)  # noqa: E731
        return _repeated(rng, [make(number) for number in range(12 * len(OVERLAPPED))])

    return cases
