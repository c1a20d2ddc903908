"""Hit rates and writes of the offload manager on a trace: `python -m bench.offload.trace TRACE`.

TRACE is a file in the format of Mooncake's traces: one JSON object for each request, with its
`hash_ids`, one for each block of 512 tokens; equal ids are equal prefixes. Published with the paper
(FAST 2025): https://github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0.

Requests run one after the other, in the order of the trace, and each copy completes before the next
one. With unlimited memory, and for each capacity, eviction policy and write policy:

- hit rate: share of the blocks found in a prefix, in the host tier or the device cache;
- blocks written: share of the blocks stored to the host tier.

Without a device cache, each hit is a load from the host tier. With an LRU device cache of
`DEVICE_BLOCKS`, without which write-back would be write-through, its hits count too.

Checks: with LRU and without a device cache, hits and writes are those of `simulate`, a simulator
that shares no code with the manager.
"""

import itertools
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.harness.main import Flags, benchmark
from bench.harness.records import HOST, Results
from jaxkv.offload import LoadSpec, OffloadManager, StoreSpec

CAPACITIES = (3_000, 10_000, 30_000)
POLICIES = ("lru", "arc")
WRITES = ("through", "second_use")
DEVICE_BLOCKS = 1_000
REMEMBERED = 65_536  # keys of the most recent uses that "second_use" remembers, or twice the pages
WANTED_CAPACITY, WANTED_SHARE, WANTED_LOSS = 10_000, 20.0, 1.0  # percent; points of hit rate

Requests = Sequence[Sequence[bytes]]


class Replay(NamedTuple):
    """Blocks of a trace: all, found in a prefix, and stored to the host tier."""

    blocks: int
    hits: int
    written: int

    @property
    def hit_rate(self) -> float:
        return 100 * self.hits / self.blocks

    @property
    def share_written(self) -> float:
        return 100 * self.written / self.blocks


def read(path: Path) -> list[list[bytes]]:
    """Keys of the blocks of each request."""
    lines = path.read_text().splitlines()
    return [[i.to_bytes(36, "big") for i in json.loads(line)["hash_ids"]] for line in lines]


class DeviceCache:
    """Keys of an LRU device cache."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def prefix(self, keys: Iterable[bytes]) -> int:
        n = 0
        for key in keys:
            if key not in self._order:
                break
            n += 1
        return n

    def use(self, keys: Sequence[bytes]) -> list[bytes]:
        """Puts a request into the cache; returns the evicted blocks, the oldest last."""
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key)
        excess = max(0, len(self._order) - self._num_blocks)
        return [self._order.popitem(last=False)[0] for _ in range(excess)][::-1]


def run(manager: OffloadManager, spec: LoadSpec | StoreSpec) -> None:
    manager.start(spec)
    manager.complete(spec)


def replay(requests: Requests, manager: OffloadManager, device_blocks: int = 0) -> Replay:
    device = DeviceCache(device_blocks)
    blocks = hits = 0
    for keys in requests:
        on_device = device.prefix(keys)
        found = manager.lookup(keys[on_device:]).num_blocks
        manager.touch(keys)
        run(manager, manager.prepare_load(keys[on_device : on_device + found]))
        run(manager, manager.prepare_store(keys))
        run(manager, manager.prepare_store(device.use(keys), evicted=True))
        blocks += len(keys)
        hits += on_device + found
    return Replay(blocks, hits, int(manager.metrics()["kv_offload_stored_blocks"]))


def simulate(requests: Requests, num_pages: int, *, second_use: bool) -> Replay:
    """`replay` with LRU and `write="second_use"` or `"through"`, without a device cache."""
    # Least recently used first; the head of a request is its most recently used block.
    cache, used = OrderedDict[bytes, None](), OrderedDict[bytes, None]()
    blocks = hits = written = 0
    for keys in requests:
        blocks += len(keys)
        hits += next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        new = [key for key in keys if key not in cache and (key in used or not second_use)]
        resident = [key for key in keys if key in cache]
        stored = {*new[: num_pages - len(resident)]}
        for order, members in ((used, {*keys}), (cache, stored.union(resident))):
            for key in filter(members.__contains__, reversed(keys)):
                order[key] = None
                order.move_to_end(key)
        for order, limit in ((used, max(REMEMBERED, 2 * num_pages)), (cache, num_pages)):
            for _ in range(len(order) - limit):
                order.popitem(last=False)
        written += len(stored)
    return Replay(blocks, hits, written)


def measure(results: Results, flags: Flags) -> None:
    requests, rates = read(flags.trace), dict[str, float]()
    unlimited = replay(requests, OffloadManager(len({key for keys in requests for key in keys})))
    results.row("trace", "requests", "requests", len(requests))
    results.row("trace", "blocks", "blocks", unlimited.blocks)
    results.row("unlimited memory", "hit rate", "%", unlimited.hit_rate)
    for num_pages in CAPACITIES:
        for device_blocks, writes in ((0, WRITES), (DEVICE_BLOCKS, (*WRITES, "back"))):
            for policy, write in itertools.product(POLICIES, writes):
                manager = OffloadManager(num_pages, policy=policy, write=write)
                found = replay(requests, manager, device_blocks)
                case = f"{num_pages:,} blocks {policy} {write}"
                case += f", device cache of {device_blocks:,}" if device_blocks else ""
                results.row(case, "hit rate", "%", found.hit_rate)
                results.row(case, "blocks written", "%", found.share_written)
                rates[case] = found.hit_rate
                if policy == "lru" and not device_blocks:
                    want = simulate(requests, num_pages, second_use=write == "second_use")
                    results.check(f"hits, {case}", found.hits, "==", want.hits, "blocks")
                    results.check(f"writes, {case}", found.written, "==", want.written, "blocks")
                if case == f"{WANTED_CAPACITY:,} blocks lru second_use":
                    name = f"blocks written, {case}"
                    results.target(name, found.share_written, "<=", WANTED_SHARE, "%")
                    lost = rates[case.replace("second_use", "through")] - found.hit_rate
                    name = f"hit rate lost, {case}"
                    results.target(name, lost, "<=", WANTED_LOSS, "points")


main = benchmark(
    "offload_trace",
    __doc__,
    measure,
    options={"trace": {"type": Path, "help": "file with one request in each line"}},
    device=HOST,
    needs_gpu=False,
)

if __name__ == "__main__":
    sys.exit(main())
