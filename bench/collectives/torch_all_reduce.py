"""All-reduces of PyTorch, one rank of them; needs PyTorch and GPUs.

`python -m bench.collectives.torch_all_reduce REQUEST` is started by `bench.collectives.all_reduce`,
once per GPU; REQUEST is JSON with "rank", "world", "port", "sizes", and "backend" of the symmetric
memory: "CUDA", or "NCCL", whose all-reduce then uses its symmetric kernels. Output: JSON lines as
those of `bench.collectives.all_reduce_rank`: "call" are times per call in replays of a CUDA graph
of CALLS calls, "kernels" the seconds of each call's kernel in such replays. NCCL takes any array;
the methods of symmetric memory take one in it, so their times exclude the copy into it.
COPIES is the peak of the links with all devices sending and receiving: each device's copy engine
writes the array to the next device.
"""

import json
import re
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

CALLS, REPLAYS, PROFILED_REPLAYS = 20, 12, 6
REDUCING = re.compile("all.?reduce|nccl|shot", re.IGNORECASE)
NCCL, ONE_SHOT, TWO_SHOT = "torch NCCL", "torch one_shot", "torch two_shot"
NCCL_SYMMETRIC = "torch NCCL, symmetric memory"
COPIES = "copy to the next device"  # as in all_reduce.py, which runs without PyTorch
MIN_COPY_BYTES = 16 << 20  # below that latency dominates


class Rank:
    """One GPU and its peers."""

    def __init__(self, rank: int, world: int, port: int, backend: str):
        if backend == "NCCL":
            symmetric_memory.set_backend("NCCL")  # before any allocation
        self.backend = backend
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
            device_id=self.device,
        )  # fmt: skip
        self.world, self.group = world, dist.group.WORLD.group_name
        self.stream = torch.cuda.Stream()

    def methods(self, num_bytes: int) -> dict[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        """Each method, and its operand."""
        count, operations = num_bytes // 2, torch.ops.symm_mem
        plain = torch.empty(count, dtype=torch.bfloat16, device=self.device)
        shared = symmetric_memory.empty(count, dtype=torch.bfloat16, device=self.device)
        symmetric_memory.rendezvous(shared, self.group)

        def nccl() -> torch.Tensor:
            dist.all_reduce(plain)
            return plain

        def nccl_symmetric() -> torch.Tensor:
            dist.all_reduce(shared)
            return shared

        if self.backend == "NCCL":
            return {NCCL_SYMMETRIC: (shared, nccl_symmetric)}

        def one_shot() -> torch.Tensor:
            return operations.one_shot_all_reduce(shared, "sum", self.group)

        def two_shot() -> torch.Tensor:
            return operations.two_shot_all_reduce_(shared, "sum", self.group)

        return {NCCL: (plain, nccl), ONE_SHOT: (shared, one_shot), TWO_SHOT: (shared, two_shot)}

    def copy(self, num_bytes: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """This device's array, and a copy of a local array to the next device's."""
        shape, dtype = (num_bytes // 2,), torch.bfloat16
        plain = torch.ones(shape, dtype=dtype, device=self.device)
        shared = symmetric_memory.empty(*shape, dtype=dtype, device=self.device)
        handle = symmetric_memory.rendezvous(shared, self.group)
        there = handle.get_buffer((handle.rank + 1) % self.world, shape, dtype)
        return shared, lambda: there.copy_(plain)

    def verify(self, array: torch.Tensor, call: Callable[[], torch.Tensor]) -> None:
        """Raises AssertionError if the sum of ones is not the number of ranks; leaves zeros."""
        array.fill_(1)
        self.wait()
        if not bool((call() == self.world).all()):
            raise AssertionError("wrong values")
        self.wait()
        array.zero_()
        self.wait()

    def graph(self, call: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.stream):
            call()
            call()
            self.wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(CALLS):
                    call()
            graph.replay()
        self.wait()
        return graph

    def seconds(self, graph: torch.cuda.CUDAGraph) -> list[float]:
        """Seconds per call in each replay."""
        samples = []
        with torch.cuda.stream(self.stream):
            for _ in range(REPLAYS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(self.stream)
                graph.replay()
                end.record(self.stream)
                torch.cuda.synchronize()
                samples.append(begin.elapsed_time(end) / 1e3 / CALLS)
        return samples

    def kernels(self, graph: torch.cuda.CUDAGraph) -> list[float]:
        """Seconds of each call's kernel in some replays, in order."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            with torch.cuda.stream(self.stream):
                for _ in range(PROFILED_REPLAYS):
                    graph.replay()
            torch.cuda.synchronize()
        found = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and REDUCING.search(event.name)
        )
        if len(found) != CALLS * PROFILED_REPLAYS:
            raise RuntimeError(f"{len(found)} kernels in {CALLS * PROFILED_REPLAYS} calls")
        return [(end - begin) / 1e6 for begin, end in found]

    def wait(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()


def main(request: dict) -> None:
    rank = Rank(request["rank"], request["world"], request["port"], request["backend"])
    graphs = {}
    broken = set()
    for num_bytes in request["sizes"]:
        for method, (array, call) in rank.methods(num_bytes).items():
            if method in broken:
                continue
            try:
                rank.verify(array, call)
                graph = rank.graph(call)
                _emit(num_bytes, method, call=rank.seconds(graph))
                graphs[num_bytes, method] = graph, array  # keeps the array alive
            except Exception as error:  # on all ranks alike, or the others are killed
                broken.add(method)
                _emit(num_bytes, method, failed=f"{type(error).__name__}: {error}"[:500])
    for num_bytes in request["sizes"] if request["backend"] == "CUDA" else ():
        if num_bytes >= MIN_COPY_BYTES:
            keep, call = rank.copy(num_bytes)
            _emit(num_bytes, COPIES, call=rank.seconds(rank.graph(call)))
            rank.wait()
            assert bool((keep == 1).all())
    for (num_bytes, method), (graph, _) in graphs.items():  # last: profiling has lasting effects
        rank.wait()
        try:
            _emit(num_bytes, method, kernels=[rank.kernels(graph)])
        except RuntimeError as error:
            _emit(num_bytes, method, unprofiled=str(error))
    rank.wait()
    graphs.clear()
    dist.destroy_process_group()


def _emit(num_bytes: int, method: str, **figures: object) -> None:
    print(json.dumps({"bytes": num_bytes, "method": method, **figures}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
