"""A Triton kernel that copies blocks with vLLM's published parameters; needs PyTorch and a GPU.

`python -m bench.harness.triton_baseline REQUEST` is started by
`bench.harness.copy_baselines.triton`; REQUEST is JSON with "pool_bytes", "blocks" (pairs of a size
and a number of sets) and their "count" in a set. Output: a line of JSON with the samples for each
direction and size.

The parameters (vLLM's swap_blocks kernel): min(12, n) programs, program p copies the jobs p, p + 12
and so on, in words of 8 bytes and chunks of min(8 KiB, the block rounded up to a power of two). A
job is three int64: source address, destination address, and bytes. Here they are in device memory,
which is faster than reading them over the link. The code is our own.
"""

import itertools
import json
import sys
import time

import torch
import triton
import triton.language as tl

PROGRAMS = 12
MAX_CHUNK_BYTES = 8192
WORD_BYTES = 8
CHAIN_SECONDS = 0.02
REPEATS = 9


@triton.jit
def _copy(sources, destinations, sizes, count, chunk: tl.constexpr):  # chunk in words
    for job in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(sources + job).to(tl.pointer_type(tl.int64))
        destination = tl.load(destinations + job).to(tl.pointer_type(tl.int64))
        words = tl.load(sizes + job) // 8
        for begin in range(0, words, chunk):
            at = begin + tl.arange(0, chunk)
            inside = at < words
            tl.store(destination + at, tl.load(source + at, mask=inside), mask=inside)


class Memory:
    """Bytes on the host and on the GPU, as many as in an engine's pool."""

    def __init__(self, num_bytes: int):
        words = num_bytes // WORD_BYTES
        self.device = torch.empty(words, dtype=torch.int64, device="cuda")
        self.device.random_()
        self.host = torch.empty(words, dtype=torch.int64, pin_memory=True)
        self.host.copy_(self.device)
        self.device.random_()

    def blocks(self, block_bytes: int) -> list[torch.Tensor]:
        words = block_bytes // WORD_BYTES
        return [x[: len(x) // words * words].view(-1, words) for x in (self.host, self.device)]


class Copy:
    """`count` scattered blocks between pinned memory and the GPU, in one direction.

    Consecutive copies cycle through `num_sets` sets of blocks.
    """

    def __init__(self, memory: Memory, direction: str, block_bytes: int, count: int, num_sets: int):
        ends = memory.blocks(block_bytes)
        self.source, self.destination = ends if direction == "load" else ends[::-1]
        # One block more than are copied, so that the first copy leaves one unchanged.
        total = num_sets * count
        self.ids = [torch.randperm(len(ends[0]), device="cuda")[: total + 1].cpu() for _ in ends]
        pairs = zip((self.source, self.destination), self.ids, strict=True)
        addresses = [(end.data_ptr() + ids[:total] * block_bytes).cuda() for end, ids in pairs]
        self.sets = itertools.cycle(zip(*(side.split(count) for side in addresses), strict=True))
        self.sizes = torch.full((count,), block_bytes, dtype=torch.int64, device="cuda")
        self.count, self.nbytes = count, count * block_bytes
        self.chunk = min(triton.next_power_of_2(block_bytes), MAX_CHUNK_BYTES) // WORD_BYTES

    def __call__(self) -> None:
        grid = (min(PROGRAMS, self.count),)
        _copy[grid](*next(self.sets), self.sizes, self.count, self.chunk)

    def verify(self) -> None:
        """Raises unless the first copy writes the expected bytes, and not the next block."""
        wanted = _rows(self.source, self.ids[0][: self.count])
        other = _rows(self.destination, self.ids[1][self.count : self.count + 1])
        self()
        torch.cuda.synchronize()
        got = _rows(self.destination, self.ids[1][: self.count + 1])
        if not torch.equal(got, torch.cat([wanted, other])):
            raise AssertionError(f"wrong bytes, {self.count} blocks, {self.nbytes} bytes")

    def seconds(self, calls: int) -> list[float]:
        """Seconds per copy of `calls` consecutive copies with one wait at the end, by repeat."""
        samples = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                self()
            torch.cuda.current_stream().synchronize()
            samples.append((time.perf_counter() - start) / calls)
        return samples


def _rows(blocks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return blocks[ids.to(blocks.device)].cpu()


def main(request: dict) -> None:
    torch.manual_seed(0)
    memory = Memory(request["pool_bytes"])
    for direction in ("load", "store"):
        for block_bytes, num_sets in request["blocks"]:
            copy = Copy(memory, direction, block_bytes, request["count"], num_sets)
            copy.verify()
            calls = max(2, min(10, int(CHAIN_SECONDS / min(copy.seconds(1)))))
            answer = {"direction": direction, "bytes": block_bytes, "seconds": copy.seconds(calls)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
