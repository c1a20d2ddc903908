"""Speed of the offload manager on one core: `python -m bench.offload.manager [--quick]`.

- lookup, by keys made for it: time per block of a prefix that is stored entirely; of a sliding
  window of two blocks where every other block is missing, so that all are read;
- operations: blocks per second through `prepare_load`, `start` and `complete`; through
  `prepare_store` with an eviction each, `start` and `complete`; and in a loop of requests that
  look up, touch, load half of their blocks and store the other half. A block counts once in each;
- hashing: time per block, which is not part of the others.

The median of several rounds; keys are as `BlockHasher` and `BlockGroup` make them. Needs no GPU.
"""

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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


def rate(run: Callable[[], int], rounds: int) -> timing.Figure:
    """Blocks per second; `run` returns their number."""
    measured = []
    for _ in range(rounds):
        begin = time.perf_counter()
        blocks = run()
        measured.append(blocks / (time.perf_counter() - begin))
    return timing.median(measured)


def lookups(number: int, rounds: int) -> Iterator[tuple[str, float]]:
    stored = requests(number)
    manager = OffloadManager(number * BLOCKS)
    for keys in stored:
        end(manager, manager.prepare_store(keys))

    fresh = iter([requests(number) for _ in range(2 * rounds)])  # bytes cache their hash

    def look_up(window: int | None) -> int:
        for keys in next(fresh):
            manager.lookup(keys, window)
        return number * BLOCKS

    yield "prefix", 1e6 / rate(lambda: look_up(None), rounds)
    holes = [key for keys in stored for key in keys[::2]]
    manager.discard(holes)
    yield "sliding window", 1e6 / rate(lambda: look_up(2), rounds)


def operations(policy: str, number: int, rounds: int) -> Iterator[tuple[str, float]]:
    manager = OffloadManager(number * BLOCKS, policy=policy)
    stored = requests(number)
    for keys in stored:
        end(manager, manager.prepare_store(keys))

    def load() -> int:
        for keys in stored:
            end(manager, manager.prepare_load(keys))
        return number * BLOCKS

    yield "load", rate(load, rounds)
    other = itertools.cycle(requests(3 * number)[number:])

    def store() -> int:
        for keys in itertools.islice(other, number):
            end(manager, manager.prepare_store(keys))
        return number * BLOCKS

    yield "store with eviction", rate(store, rounds)
    turns = requests(4 * number, shared=BLOCKS // 2)
    random.Random(0).shuffle(turns)
    turn = itertools.cycle(turns)

    def serve() -> int:
        for keys in itertools.islice(turn, number):
            found = manager.lookup(keys).num_blocks
            manager.touch(keys)
            end(manager, manager.prepare_load(keys[:found]), manager.prepare_store(keys))
        return number * BLOCKS

    serve()
    yield "requests, half of them stored", rate(serve, rounds)


def measure(results: Results, flags: Flags) -> None:
    number, rounds = (4, 3) if flags.quick else (64, 9)  # requests

    def target(name: str, got: float, op: str, want: float, unit: str) -> None:
        if not flags.quick:
            results.target(name, got, op, want, unit)

    for case, microseconds in lookups(number, rounds):
        name = f"lookup, {case}"
        results.row(name, "time per block", "us", microseconds)
        target(name, microseconds, "<=", WANTED_LOOKUP_US, "us per block")
    for policy in ("lru", "arc"):
        for case, blocks in operations(policy, number, rounds):
            results.row(f"{case}, {policy}", "rate", "blocks/s", blocks)
            target(f"{case}, {policy}", blocks, ">=", WANTED_RATE, "blocks/s")
    for block_size in BLOCK_SIZES:
        hasher = BlockHasher(block_size, model="bench")
        tokens = [random.randrange(1 << 17) for _ in range(block_size * number)]
        blocks = rate(partial(hash_blocks, hasher, tokens), rounds)
        results.row(f"hashing, {block_size} tokens", "time per block", "us", 1e6 / blocks)


def hash_blocks(hasher: BlockHasher, tokens: Sequence[int]) -> int:
    return len(hasher.hashes(tokens))


main = benchmark("offload_manager", __doc__, measure, device=HOST, needs_gpu=False)

if __name__ == "__main__":
    sys.exit(main())
