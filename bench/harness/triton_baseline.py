"""A Triton kernel that copies blocks with vLLM's published parameters; needs PyTorch and a GPU.

`python -m bench.harness.triton_baseline REQUEST` is started by
`bench.harness.copy_baselines.triton`; REQUEST is JSON with the keys of that function's arguments,
and the last line of output is the result.

The parameters (vLLM's swap_blocks kernel): min(12, n) programs, program p copies the jobs p, p + 12
and so on, in words of 8 bytes and chunks of min(8 KiB, the block rounded up to a power of two). A
job is three int64: source address, destination address, and bytes. Here they are in device memory,
which is faster than reading them over the link. The code is our own.
"""

import json
import statistics
import sys
import time

import torch
import triton
import triton.language as tl

PROGRAMS = 12
MAX_CHUNK_BYTES = 8192
WORD_BYTES = 8
CHAIN_SECONDS = 0.02
REPEATS = 5


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


class Copy:
    """`count` scattered blocks between pinned memory and the GPU, in one direction."""

    def __init__(self, direction: str, block_bytes: int, count: int):
        num_blocks, words = count + count // 16 + 1, block_bytes // WORD_BYTES
        shape = (num_blocks, words)
        on_device = torch.randint(-(2**62), 2**62, shape, dtype=torch.int64, device="cuda")
        on_host = torch.randint(-(2**62), 2**62, shape, dtype=torch.int64, device="cuda").cpu()
        ends = [on_host.pin_memory(), on_device]
        self.source, self.destination = ends if direction == "load" else ends[::-1]
        self.ids = [torch.randperm(num_blocks)[:count] for _ in range(2)]
        pairs = zip((self.source, self.destination), self.ids, strict=True)
        self.addresses = [(end.data_ptr() + ids * block_bytes).cuda() for end, ids in pairs]
        self.sizes = torch.full((count,), block_bytes, dtype=torch.int64, device="cuda")
        self.count, self.nbytes = count, count * block_bytes
        self.chunk = min(triton.next_power_of_2(block_bytes), MAX_CHUNK_BYTES) // WORD_BYTES

    def __call__(self) -> None:
        grid = (min(PROGRAMS, self.count),)
        _copy[grid](*self.addresses, self.sizes, self.count, self.chunk)

    def verify(self) -> None:
        """Raises unless one copy gives the expected bytes everywhere."""
        before = self.destination.cpu().clone()  # .cpu() of a tensor in host memory is no copy
        before[self.ids[1]] = self.source.cpu()[self.ids[0]]
        self()
        torch.cuda.synchronize()
        if not torch.equal(before, self.destination.cpu()):
            raise AssertionError(f"wrong bytes, {self.count} blocks, {self.nbytes} bytes")

    def seconds(self, calls: int) -> float:
        """Median seconds per copy of `calls` consecutive copies with one wait at the end."""
        samples = []
        for _ in range(REPEATS if calls > 1 else 10 * REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                self()
            torch.cuda.current_stream().synchronize()
            samples.append((time.perf_counter() - start) / calls)
        return statistics.median(samples)


def main(request: dict) -> dict:
    torch.manual_seed(0)
    bandwidth, latency = [], []
    for direction in ("load", "store"):
        for block_bytes in request["blocks"]:
            copy = Copy(direction, block_bytes, request["count"])
            copy.verify()
            calls = max(2, min(10, int(CHAIN_SECONDS / copy.seconds(1))))
            bandwidth.append((direction, block_bytes, copy.nbytes / copy.seconds(calls) / 1e9))
        for count in request["small_counts"]:
            copy = Copy(direction, request["small_block"], count)
            copy.verify()
            latency.append((direction, count, copy.seconds(1)))
    return {"bandwidth": bandwidth, "latency": latency}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
