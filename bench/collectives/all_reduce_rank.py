"""Times all-reduces in chains within one program; `bench.collectives.all_reduce` runs it and says
what for.

`python -m bench.collectives.all_reduce_rank REQUEST` drives all devices, or one of them where
several processes
do the work. For each size and each way it prints a line of JSON: {"bytes", "way", "algorithm",
"pair", "alone"}, later one with "kernels", or why not: "refused", "failed", "unprofiled". Seconds
of a pair of an all-reduce and a product, and (of what is chosen and of psum) of an all-reduce in a
chain of nothing else, are by wall clock over calls that follow each other. "kernels" holds a list
for each GPU of this process: the seconds that each all-reduce took there, in the chain of nothing
else if there is one, else in the pairs. All ranks run the same: no clock decides how much.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxkv
from bench.harness import profiler, timing
from jaxkv._src.tuning import all_reduce_table

AXIS = "tp"
CHOSEN, PSUM = "chosen", "psum"
# The largest message, all-reduces of a chain, and calls of it that follow each other: some 20 ms of
# them, as it takes up to a millisecond until the first is under way.
CHAINS = ((256 << 10, 128, 40), (4 << 20, 64, 40), (1 << 62, 16, 20))
QUICK_CHAIN, ROUNDS = (4, 2), 5  # few, as the CPU backend starves where many collectives queue
PROFILED_CALLS = 4
PAUSE_SECONDS = 0.05  # between what is profiled; far more than between kernels of one program
COMPILERS = min(16, os.cpu_count() or 1)
REDUCING = re.compile("all.?reduce|nccl|shot|latency|multimem|^psum_", re.IGNORECASE)
STAGING = re.compile("memcpy|memset", re.IGNORECASE)
TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Request:
    """What one process is to do.

    Attributes:
      platform: "cpu" or "gpu".
      world: devices that reduce together.
      ways: "chosen" by the tuning table, an implementation's name, or None for all of them.
      sizes: bytes of a message on each device.
      quick: chains of a few calls.
      rank: of this process, which has one device; None if it has all.
      port: where the processes meet.
    """

    platform: str
    world: int
    ways: list[str] | None
    sizes: list[int]
    quick: bool = False
    rank: int | None = None
    port: int = 0


@dataclasses.dataclass
class Program:
    """Chains of one way and size.

    Attributes:
      num_bytes, way: what is reduced, and how.
      algorithm: the one that `way` comes to.
      length: all-reduces of a chain.
      calls: of a chain that follow each other.
      chains: "pair" and, of some ways, "alone": traced, later compiled.
      states: of each of them, which it is given to write in, as a step is.
      expected: a row of what the pairs give.
      samples: of each round the seconds of an all-reduce in each of the chains, by wall clock.
    """

    num_bytes: int
    way: str
    algorithm: str
    length: int
    calls: int
    chains: dict[str, Any]
    states: dict[str, Any]
    expected: np.ndarray
    samples: list[dict[str, float]] = dataclasses.field(default_factory=list)

    @property
    def profiled_chain(self) -> str:
        """That of nothing else: a product would let ranks drift apart, and the last not wait."""
        return "alone" if "alone" in self.chains else "pair"

    def answer(self) -> dict[str, Any]:
        """What tells its figures from others."""
        return {"bytes": self.num_bytes, "way": self.way, "algorithm": self.algorithm}

    def verify(self) -> None:
        """Raises AssertionError if the pairs give wrong sums."""
        self.states["pair"] = self.chains["pair"](self.states["pair"])
        for shard in self.states["pair"].addressable_shards:
            found = np.asarray(shard.data)[0]
            if not np.array_equal(found.view(np.uint16), self.expected.view(np.uint16)):
                raise AssertionError("wrong sums")

    def sample(self) -> None:
        """Times each of the chains once."""
        taken = {}
        for name, chain in self.chains.items():
            seconds, self.states[name] = timing.seconds_per_call(
                chain, self.states[name], calls=self.calls, repeats=1, warmup=1
            )
            taken[name] = seconds / self.length
        self.samples.append(taken)

    def seconds(self) -> dict[str, float]:
        """The median of the samples of each chain."""
        return {name: statistics.median(s[name] for s in self.samples) for name in self.chains}


class Bench:
    """The devices, and programs on them."""

    def __init__(self, request: Request):
        self.request = request
        self.mesh = jax.sharding.Mesh(np.array(_devices(request)), (AXIS,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self.ways = request.ways or [CHOSEN, *all_reduce_table.ALGORITHMS]
        self.memory: jaxkv.SymmetricMemory | None = None
        if self.ways != [PSUM]:
            self._create()

    def _create(self) -> None:
        """Where there is no such memory, XLA's psum is still measured."""
        try:
            self.memory = jaxkv.SymmetricMemory.create(
                self.mesh, AXIS, max_bytes=max(self.request.sizes), timeout_s=TIMEOUT_S
            )
        except (NotImplementedError, RuntimeError) as error:
            for way in self.ways:
                if way != PSUM:
                    _tell({"way": way, "refused": f"{type(error).__name__}: {error}"})
            self.ways = [PSUM]

    def reduce(self, x: Any, way: str) -> Any:
        if way == PSUM or self.memory is None:
            return jax.lax.psum(x, AXIS)
        return jaxkv.all_reduce(self.memory, x, AXIS, implementation=None if way == CHOSEN else way)

    def algorithm(self, num_bytes: int, way: str) -> str:
        if way != CHOSEN or self.memory is None:
            return way
        message = jax.ShapeDtypeStruct((num_bytes // 2,), jnp.bfloat16)
        told = jaxkv.explain(jaxkv.all_reduce, self.memory, message, AXIS)
        return told.partition(": ")[2].split(" ")[0]

    def states(self, num_bytes: int) -> tuple[dict[str, Any], np.ndarray]:
        """What chains start from, and the mean of the rows that the pairs start from.

        Every sum on the way is a multiple of the number of ranks, and bfloat16 holds it exactly.
        """
        world, count = self.request.world, num_bytes // 2
        pattern = (np.arange(8)[None] + 3 * np.arange(world)[:, None]) % 8
        rows = [np.resize((row * world).astype(jnp.bfloat16), count) for row in pattern]
        put = functools.partial(
            jax.make_array_from_callback, (world, count), self.sharding, dtype=jnp.bfloat16
        )

        def row_of(index: Any) -> np.ndarray:
            return rows[index[0].start or 0][None]

        # Without products sums grow; zeros don't.
        starts = {"pair": put(row_of), "alone": put(lambda _: np.zeros((1, count), jnp.bfloat16))}
        return starts, np.resize(pattern.sum(0).astype(jnp.bfloat16), count)

    def lower(self, num_bytes: int, way: str) -> Program:
        """A program whose chains are traced only; raises as `all_reduce`."""
        _, length, calls = next(chain for chain in CHAINS if num_bytes <= chain[0])
        length, calls = QUICK_CHAIN if self.request.quick else (length, calls)

        @jax.jit
        def alone(x: Any) -> Any:
            return self.reduce(x, way)

        @jax.jit
        def pair(x: Any) -> Any:
            return self.reduce(x, way) * (1 / self.request.world)

        bodies = {"pair": pair, "alone": alone} if way in (CHOSEN, PSUM) else {"pair": pair}
        states, expected = self.states(num_bytes)
        chains = {
            name: self._chain(body, length).lower(states[name]) for name, body in bodies.items()
        }
        algorithm = self.algorithm(num_bytes, way)
        return Program(num_bytes, way, algorithm, length, calls, chains, states, expected)

    def _chain(self, body: Callable[[Any], Any], length: int) -> Any:
        def chain(x: Any) -> Any:
            for _ in range(length):
                x = body(x)
            return x

        spec = PartitionSpec(AXIS)
        mapped = jax.shard_map(
            chain, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=0)

    def programs(self) -> Iterator[Program]:
        """All that compile and give right sums; what doesn't is told."""
        lowered = []
        for num_bytes in self.request.sizes:
            for way in self.ways:
                try:
                    lowered.append(self.lower(num_bytes, way))
                except NotImplementedError as error:
                    _tell({"bytes": num_bytes, "way": way, "refused": str(error)})
        with ThreadPoolExecutor(COMPILERS) as pool:
            waiting = [
                {name: pool.submit(chain.compile) for name, chain in program.chains.items()}
                for program in lowered
            ]
            for program, compiling in zip(lowered, waiting, strict=True):
                with _told(program):
                    program.chains = {name: one.result() for name, one in compiling.items()}
                    program.verify()
                    yield program

    def measure(self) -> None:
        programs = list(self.programs())
        for done in range(ROUNDS):  # in which all take turns, as the host's pace drifts
            for program in programs:
                with _told(program):
                    program.sample()
            programs = [program for program in programs if len(program.samples) > done]
        for num_bytes in self.request.sizes:
            here = [program for program in programs if program.num_bytes == num_bytes]
            for program in here:
                _tell({**program.answer(), **program.seconds()})
            for program, traced in zip(here, profiled(here), strict=True):
                _tell({**program.answer(), **traced})
            if self.memory:
                self.memory.check_errors()
        if self.memory:
            self.memory.close()


@contextlib.contextmanager
def _told(program: Program) -> Iterator[None]:
    """An error of one way is told, and the others go on."""
    try:
        yield
    except Exception as error:
        _tell({**program.answer(), "failed": f"{type(error).__name__}: {error}"[:500]})


def profiled(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """Of each program the seconds of all-reduces on each GPU, and the names of their kernels."""
    if jax.default_backend() != "gpu" or not programs:
        return [{} for _ in programs]

    def run() -> None:
        for program in programs:
            name = program.profiled_chain
            for _ in range(PROFILED_CALLS):
                program.states[name] = program.chains[name](program.states[name])
            jax.block_until_ready(program.states[name])
            time.sleep(PAUSE_SECONDS)

    try:
        devices = [_between_pauses(events) for events in profiler.trace(run) if events]
    except Exception as error:  # the wall clock's figures are worth having without it
        return [{"unprofiled": f"{type(error).__name__}: {error}"}] * len(programs)
    found: list[dict[str, Any]] = []
    for number, program in enumerate(programs):
        here = [device[number] for device in devices if len(device) == len(programs)]
        wanted = PROFILED_CALLS * program.length
        seconds = [reductions(events, wanted) for events in here]
        shards = program.states[program.profiled_chain].addressable_shards
        if len(seconds) == len(shards) and all(seconds):
            names = {unnumbered(event.name) for event in here[0] if REDUCING.search(event.name)}
            found.append({"kernels": seconds, "names": sorted(names)})
        else:
            ran = dict(Counter(event.name for events in here for event in events))
            told = f"{wanted} all-reduces on {len(shards)} devices can't be told in {ran}"
            found.append({"unprofiled": f"{told}; programs: {[*map(len, devices)]}"})
    return found


def _between_pauses(events: Sequence[profiler.Event]) -> list[list[profiler.Event]]:
    parts: list[list[profiler.Event]] = []
    end = -np.inf
    for event in events:
        if event.start - end > PAUSE_SECONDS / 2 * 1e9:
            parts.append([])
        parts[-1].append(event)
        end = event.end
    return parts


def reductions(events: Sequence[profiler.Event], count: int) -> list[float]:
    """Seconds of each of `count` all-reduces; none if their kernels don't divide by it.

    Those of an all-reduce are its kernels, and copies and fills right before each.
    """
    seconds: list[float] = []
    before = 0.0
    for event in events:
        taken = (event.end - event.start) / 1e9
        if STAGING.search(event.name):
            before += taken
            continue
        if REDUCING.search(event.name):
            seconds.append(before + taken)
        before = 0.0
    each, rest = divmod(len(seconds), count)
    if rest or not each:
        return []
    return [sum(seconds[i : i + each]) for i in range(0, len(seconds), each)]


def unnumbered(kernel: str) -> str:
    """One name for what XLA calls psum_512_0_fusion_1, psum_513_0_fusion_1 and so on."""
    return re.sub(r"_\d+", "", kernel) if kernel.startswith("psum_") else kernel


def _devices(request: Request) -> list[jax.Device]:
    if request.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1 if request.rank is not None else request.world)
    if request.rank is not None:
        jax.distributed.initialize(
            f"127.0.0.1:{request.port}", request.world, request.rank,
            local_device_ids=[request.rank] if request.platform == "gpu" else None,
        )  # fmt: skip
    return jax.devices()[: request.world]


def _tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    Bench(Request(**json.loads(sys.argv[1]))).measure()
