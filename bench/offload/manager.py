"""Speed of the offload manager on one core: `python -m bench.offload.manager [--quick]`.

- lookup, by keys made for it: time per block of a prefix that is stored entirely; of a sliding
  window of two blocks where every other block is missing, so that all are read;
- operations: blocks per second through `prepare_load`, `start` and `complete`; through
  `prepare_store` with an eviction each, `start` and `complete`; and in a loop of requests that
  look up, touch, load half of their blocks and store the other half. A block counts once in each;
- hashing: time per block, which is not part of the others.

The median of rounds, each of all cases in a new random order: the speed of a shared machine changes
within seconds. Keys are as `BlockHasher` and `BlockGroup` make them. Needs no GPU.
"""

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from bench.harness import timing
from bench.harness.main import Flags, benchmark
from bench.harness.records import HOST, Results
from jaxkv.offload import BlockGroup, BlockHasher, LoadSpec, OffloadManager, StoreSpec

BLOCKS = 256  # of a request
WANTED_LOOKUP_US, WANTED_RATE = 1.0, 200_000
BLOCK_SIZES = (16, 64, 512)  # of hashing


def requests(number: int, shared: int = 0) -> list[list[bytes]]:
    """Keys of requests; the first `shared` blocks of each are those of the first one."""
    hasher, group = BlockHasher(1, model="bench"), BlockGroup()
    first = range(shared)
    return [
        group.keys(hasher.hashes([*first, *range(i * BLOCKS, (i + 1) * BLOCKS - shared)]))
        for i in range(1, number + 1)
    ]


def end(manager: OffloadManager, *specs: LoadSpec | StoreSpec) -> None:
    for spec in specs:
        manager.start(spec)
        manager.complete(spec)


def rate(run: Callable[[], int]) -> float:
    """Blocks per second; `run` returns their number."""
    begin = time.perf_counter()
    blocks = run()
    return blocks / (time.perf_counter() - begin)


def manager_of(stored: Sequence[Sequence[bytes]], policy: str = "lru") -> OffloadManager:
    """A full manager."""
    manager = OffloadManager(len(stored) * BLOCKS, policy=policy)
    for keys in stored:
        end(manager, manager.prepare_store(keys))
    return manager


def lookups(number: int) -> dict[str, Callable[[], float]]:
    stored = requests(number)
    manager, with_holes = manager_of(stored), manager_of(stored)
    with_holes.discard([key for keys in stored for key in keys[::2]])

    def look_up(manager: OffloadManager, window: int | None) -> float:
        fresh = requests(number)  # bytes cache their hash

        def run() -> int:
            for keys in fresh:
                manager.lookup(keys, window)
            return number * BLOCKS

        return rate(run)

    return {
        "lookup, prefix": partial(look_up, manager, None),
        "lookup, sliding window": partial(look_up, with_holes, 2),
    }


def operations(policy: str, number: int) -> dict[str, Callable[[], float]]:
    stored = requests(number)
    loads, stores, serves = (manager_of(stored, policy) for _ in range(3))

    def load() -> int:
        for keys in stored:
            end(loads, loads.prepare_load(keys))
        return number * BLOCKS

    other = itertools.cycle(requests(3 * number)[number:])

    def store() -> int:
        for keys in itertools.islice(other, number):
            end(stores, stores.prepare_store(keys))
        return number * BLOCKS

    turns = requests(4 * number, shared=BLOCKS // 2)
    random.Random(0).shuffle(turns)
    turn = itertools.cycle(turns)

    def serve() -> int:
        for keys in itertools.islice(turn, number):
            found = serves.lookup(keys).num_blocks
            serves.touch(keys)
            end(serves, serves.prepare_load(keys[:found]), serves.prepare_store(keys))
        return number * BLOCKS

    serve()
    return {
        f"load, {policy}": partial(rate, load),
        f"store with eviction, {policy}": partial(rate, store),
        f"requests, half of them stored, {policy}": partial(rate, serve),
    }


def hashing(number: int) -> dict[str, Callable[[], float]]:
    made: dict[str, Callable[[], float]] = {}
    for block_size in BLOCK_SIZES:
        hasher = BlockHasher(block_size, model="bench")
        tokens = [random.randrange(1 << 17) for _ in range(block_size * number)]
        made[f"hashing, {block_size} tokens"] = partial(rate, partial(hash_blocks, hasher, tokens))
    return made


def measure(results: Results, flags: Flags) -> None:
    number, rounds = (4, 3) if flags.quick else (64, 60)  # requests

    def target(name: str, got: float, op: str, want: float, unit: str) -> None:
        if not flags.quick:
            results.target(name, got, op, want, unit)

    looked_up, hashed = lookups(number), hashing(number)
    rates = operations("lru", number) | operations("arc", number)
    samples = timing.rounds(looked_up | rates | hashed, rounds)
    found = {name: timing.median(of_rounds) for name, of_rounds in samples.items()}
    for name in looked_up:
        results.row(name, "time per block", "us", 1e6 / found[name])
        target(name, 1e6 / found[name], "<=", WANTED_LOOKUP_US, "us per block")
    for name in rates:
        results.row(name, "rate", "blocks/s", found[name])
        target(name, found[name], ">=", WANTED_RATE, "blocks/s")
    for name in hashed:
        results.row(name, "time per block", "us", 1e6 / found[name])


def hash_blocks(hasher: BlockHasher, tokens: Sequence[int]) -> int:
    return len(hasher.hashes(tokens))


main = benchmark("offload_manager", __doc__, measure, device=HOST, needs_gpu=False)

if __name__ == "__main__":
    sys.exit(main())
