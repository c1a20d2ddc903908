"""Speed of tiers below host memory: `python -m bench.offload.tiers [--directory DIR] [--quick]`.

All blocks are written, then read, with all copies queued at once. Files: O_DIRECT where the file
system allows, so that the device is measured, not the page cache. Mooncake, if it is installed: a
master on loopback, a client that lends memory, and one that writes and reads there. Median of the
rounds. No GPU.
"""

import argparse
import importlib.util
import itertools
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from bench.offload.mooncake_master import Master
from jaxkv.offload import FileTier, Tier

THREADS = (1, 4, 8)
SIZES = (1 << 20, 4 << 20)


def aligned(num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def measure(open_tier: Callable[[], Tier], total: int) -> tuple[float, float]:
    """GB/s of writes and of reads."""
    with closing(open_tier()) as tier:
        num_blocks = total // tier.block_bytes
        source, target = aligned(total), aligned(total)
        target[:] = 0  # no page faults in the timed reads
        source[:] = np.random.default_rng(0).integers(0, 256, total, np.uint8)
        keys = [os.urandom(36) for _ in range(num_blocks)]
        rates = []
        for copy, memory in ((tier.write, source), (tier.read, target)):
            begin = time.perf_counter()
            pages = memory.reshape(num_blocks, tier.block_bytes)
            futures = [copy(k, page.data) for k, page in zip(keys, pages, strict=True)]
            if not all(future.result() for future in futures):
                raise RuntimeError("a copy failed; see the warning above")
            rates.append(total / (time.perf_counter() - begin) / 1e9)
        tier.remove(keys)
    if not np.array_equal(source, target):
        raise RuntimeError("the blocks read are not those written")
    return rates[0], rates[1]


def report(case: str, open_tier: Callable[[], Tier], total: int, rounds: int) -> None:
    rates = [measure(open_tier, total) for _ in range(rounds)]
    write, read = (statistics.median(column) for column in zip(*rates, strict=True))
    print(f"{case:44} write {write:6.2f} GB/s, read {read:6.2f} GB/s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="default: that of temporary files")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    flags = parser.parse_args(argv)
    rounds, total = (1, 16 << 20) if flags.quick else (3, 512 << 20)
    with tempfile.TemporaryDirectory(dir=flags.directory) as room:
        for size, threads in itertools.product(SIZES, THREADS):
            files = partial(FileTier, room, size, 2 * total, num_threads=threads)
            case = f"files, blocks of {size >> 20} MiB, {threads} threads"
            report(case, files, total, rounds)
        if importlib.util.find_spec("mooncake") is None:
            print("not measured: Mooncake, which is not installed")
            return 0
        with Master(Path(room)) as master:
            for size in SIZES:
                with closing(master.tier(size, segment_bytes=4 * total)):
                    for threads in THREADS:
                        case = f"Mooncake, blocks of {size >> 20} MiB, {threads} threads"
                        client = partial(master.tier, size, segment_bytes=0, num_threads=threads)
                        report(case, client, total, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
