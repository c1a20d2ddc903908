"""Speed of tiers below host memory: `python -m bench.offload.tiers [--directory DIR] [--quick]`.

All blocks are written, then read, with all copies queued at once; O_DIRECT where the file system
allows, so that the device is measured, not the page cache. Median of the rounds. No GPU.
"""

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from jaxkv.offload import FileTier

THREADS = (1, 4, 8)
SIZES = (1 << 20, 4 << 20)


def aligned(num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def measure(directory: str, block_bytes: int, threads: int, total: int) -> tuple[float, float]:
    """GB/s of writes and of reads."""
    num_blocks = total // block_bytes
    source, target = aligned(total), aligned(total)
    source[:] = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    keys = [os.urandom(36) for _ in range(num_blocks)]
    with tempfile.TemporaryDirectory(dir=directory) as room:
        tier = FileTier(room, block_bytes, 2 * total, num_threads=threads)
        rates = []
        for copy, memory in ((tier.write, source), (tier.read, target)):
            begin = time.perf_counter()
            pages = memory.reshape(num_blocks, block_bytes)
            futures = [copy(k, page.data) for k, page in zip(keys, pages, strict=True)]
            if not all(future.result() for future in futures):
                raise RuntimeError("a copy failed; see the warning above")
            rates.append(total / (time.perf_counter() - begin) / 1e9)
        tier.close()
    if not np.array_equal(source, target):
        raise RuntimeError("the blocks read are not those written")
    return rates[0], rates[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="default: that of temporary files")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    flags = parser.parse_args(argv)
    directory = flags.directory or tempfile.gettempdir()
    rounds, total = (1, 16 << 20) if flags.quick else (3, 512 << 20)
    for block_bytes in SIZES:
        for threads in THREADS:
            rates = [measure(directory, block_bytes, threads, total) for _ in range(rounds)]
            write, read = (statistics.median(column) for column in zip(*rates, strict=True))
            case = f"files, blocks of {block_bytes >> 20} MiB, {threads} threads"
            print(f"{case:40} write {write:6.2f} GB/s, read {read:6.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
