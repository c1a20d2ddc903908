"""Kills processes that write to a `FileTier`: `python -m tests.util.tier_crashes DIR SEED ROUNDS`.

After each, a new tier must have only intact blocks, and no temporary files. Rounds go on, up to ten
times as many, until a process was killed in the middle of a file.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from jaxkv.offload import FileTier
from tests.util.tier_blocks import content, key, read

BLOCK_BYTES, NUM_KEYS = 1 << 16, 64


def write_forever(directory: str, seed: int) -> None:
    tier = FileTier(directory, BLOCK_BYTES, 32 * (BLOCK_BYTES + 4096), num_threads=4)
    rng = random.Random(seed)
    while True:
        keys = [key(rng.randrange(NUM_KEYS)) for _ in range(16)]
        blocks = [content(one, BLOCK_BYTES) for one in keys]
        written = [tier.write(one, memoryview(b)) for one, b in zip(keys, blocks, strict=True)]
        for future in written:
            future.result()


def main() -> None:
    directory, rng, rounds = sys.argv[1], random.Random(int(sys.argv[2])), int(sys.argv[3])
    hits = abandoned = 0
    for number in range(10 * rounds):
        if number >= rounds and hits and abandoned:
            break
        seed = rng.random()
        child = os.fork()
        if not child:
            write_forever(directory, hash(seed))
        time.sleep(rng.uniform(0.02, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        temporary = Path(directory, f"v1-{BLOCK_BYTES}", "tmp")
        abandoned += len([*temporary.iterdir()]) if temporary.exists() else 0
        tier = FileTier(directory, BLOCK_BYTES, 1 << 30)
        assert not [*temporary.iterdir()]
        found = [one for one in map(key, range(NUM_KEYS)) if tier.contains([one])[0]]
        intact = sum(read(tier, one) for one in found)
        assert intact == len(found), f"{len(found) - intact} of {len(found)} blocks are torn"
        hits += intact
        tier.close()
    print(hits, abandoned)


if __name__ == "__main__":
    main()
