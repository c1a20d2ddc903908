"""Times chains of all-reduces within one program, for `bench.collectives.all_reduce`.

`python -m bench.collectives.all_reduce_rank REQUEST` drives all devices, or one of them in a
multi-process run. Output: a JSON line for each size and method, {"bytes", "method", "algorithm",
"pair", "call"}, and a later one with "kernels"; or a reason: "unsupported", "failed", "unprofiled".
"pair" are samples of the time in seconds of an all-reduce and a product, "call" (for the table's
choice and psum) those of an all-reduce in a chain of all-reduces only; both are wall clock times
over consecutive calls. "kernels" is a list for each GPU of this process: the seconds of each
all-reduce there, in the "call" chain if there is one, else in the pairs. All ranks run the same
calls: no clock decides how many.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
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
# The largest message, all-reduces per chain, and consecutive calls of a chain: about 20 ms in
# total, as it takes up to a millisecond until the first is in flight.
CHAINS = ((256 << 10, 128, 40), (4 << 20, 64, 40), (1 << 62, 16, 20))
QUICK_CHAIN, ROUNDS = (4, 2), 5  # few, as many queued collectives starve the CPU backend
PROFILED_CALLS = 4
PAUSE_SECONDS = 0.05  # between profiled runs; far more than between kernels of one program
COMPILERS = min(16, os.cpu_count() or 1)
REDUCING = re.compile("all.?reduce|nccl|shot|latency|multimem|^psum_", re.IGNORECASE)
STAGING = re.compile("memcpy|memset", re.IGNORECASE)
TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Request:
    """Request to one process.

    Attributes:
      platform: "cpu" or "gpu".
      world: number of devices of the all-reduce.
      methods: "chosen" by the tuning table, an implementation's name, or None for all of them.
      sizes: bytes of a message per device.
      quick: chains of a few calls.
      rank: of this process, which has one device; None if it has all.
      port: of the coordinator.
    """

    platform: str
    world: int
    methods: list[str] | None
    sizes: list[int]
    quick: bool = False
    rank: int | None = None
    port: int = 0


@dataclasses.dataclass(eq=False)
class Program:
    """Chains of one method and size.

    Attributes:
      answer: keys that identify the figures: message size, method, and the algorithm to which it
        resolves.
      length: all-reduces per chain.
      calls: consecutive calls of a chain.
      chains: "pair" and, for some methods, "call": traced, later compiled.
      states: donated argument of each chain, as in a step.
      expected: a row of the pairs' result.
      samples: seconds of an all-reduce in each chain, by round, by wall clock.
    """

    answer: dict[str, Any]
    length: int
    calls: int
    chains: dict[str, Any]
    states: dict[str, jax.Array]
    expected: np.ndarray
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def profiled_chain(self) -> str:
        """The "call" chain if any: with products, ranks drift apart and the last does not wait."""
        return "call" if "call" in self.chains else "pair"

    def verify(self) -> None:
        """Raises AssertionError if the pairs give wrong values."""
        self.states["pair"] = self.chains["pair"](self.states["pair"])
        for shard in self.states["pair"].addressable_shards:
            found = np.asarray(shard.data)[0]
            if not np.array_equal(found.view(np.uint16), self.expected.view(np.uint16)):
                raise AssertionError("wrong values")

    def sample(self) -> None:
        """Times each chain once."""
        for name, chain in self.chains.items():
            seconds, self.states[name] = timing.seconds_per_call(
                chain, self.states[name], calls=self.calls, repeats=1, warmup=1
            )
            self.samples.setdefault(name, []).append(float(seconds) / self.length)


class Bench:
    """The devices, and programs on them."""

    def __init__(self, request: Request):
        self.request = request
        self.mesh = jax.sharding.Mesh(np.array(_devices(request)), (AXIS,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self.methods = request.methods or [CHOSEN, *all_reduce_table.ALGORITHMS]
        self.memory: jaxkv.SymmetricMemory | None = None
        if self.methods != [PSUM]:
            self._create()

    def _create(self) -> None:
        """Without symmetric memory XLA's psum is still measured."""
        try:
            self.memory = jaxkv.SymmetricMemory.create(
                self.mesh, AXIS, max_bytes=max(self.request.sizes), timeout_s=TIMEOUT_S
            )
        except (NotImplementedError, RuntimeError) as error:
            for method in self.methods:
                if method != PSUM:
                    _emit({"method": method, "unsupported": f"{type(error).__name__}: {error}"})
            self.methods = [PSUM]

    def reduce(self, x: jax.Array, method: str) -> jax.Array:
        if method == PSUM or self.memory is None:
            return jax.lax.psum(x, AXIS)
        implementation: Any = None if method == CHOSEN else method
        return jaxkv.all_reduce(self.memory, x, AXIS, implementation=implementation)

    def algorithm(self, num_bytes: int, method: str) -> str:
        if method != CHOSEN or self.memory is None:
            return method
        message = jax.ShapeDtypeStruct((num_bytes // 2,), jnp.bfloat16)
        explanation = jaxkv.explain(jaxkv.all_reduce, self.memory, message, AXIS)
        return explanation.partition(": ")[2].split(" ")[0]

    def states(self, num_bytes: int) -> tuple[dict[str, jax.Array], np.ndarray]:
        """Initial values of the chains, and the mean of the initial rows of the pairs.

        Every intermediate sum is a multiple of the number of ranks, exact in bfloat16.
        """
        world, count = self.request.world, num_bytes // 2
        pattern = (np.arange(8)[None] + 3 * np.arange(world)[:, None]) % 8
        rows = [np.resize((row * world).astype(jnp.bfloat16), count) for row in pattern]
        put = functools.partial(
            jax.make_array_from_callback, (world, count), self.sharding, dtype=jnp.bfloat16
        )

        def row_of(index: Any) -> np.ndarray:
            return rows[index[0].start or 0][None]

        # Without products, values grow; zeros do not.
        starts: dict[str, jax.Array] = {
            "pair": put(row_of),
            "call": put(lambda _: np.zeros((1, count), jnp.bfloat16)),
        }
        return starts, np.resize(pattern.sum(0).astype(jnp.bfloat16), count)

    def lower(self, num_bytes: int, method: str) -> Program:
        """A program with traced chains; raises as `all_reduce` does."""
        _, length, calls = next(chain for chain in CHAINS if num_bytes <= chain[0])
        length, calls = QUICK_CHAIN if self.request.quick else (length, calls)

        @jax.jit
        def call(x: jax.Array) -> jax.Array:
            return self.reduce(x, method)

        @jax.jit
        def pair(x: jax.Array) -> jax.Array:
            return self.reduce(x, method) * (1 / self.request.world)

        bodies = {"pair": pair, "call": call} if method in (CHOSEN, PSUM) else {"pair": pair}
        states, expected = self.states(num_bytes)
        chains = {
            name: self._chain(body, length).lower(states[name]) for name, body in bodies.items()
        }
        algorithm = self.algorithm(num_bytes, method)
        answer = {"bytes": num_bytes, "method": method, "algorithm": algorithm}
        return Program(answer, length, calls, chains, states, expected)

    def _chain(self, body: Callable[[jax.Array], jax.Array], length: int) -> Any:
        def chain(x: jax.Array) -> jax.Array:
            for _ in range(length):
                x = body(x)
            return x

        spec = PartitionSpec(AXIS)
        mapped = jax.shard_map(
            chain, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=0)

    def programs(self) -> list[Program]:
        """All programs that compile and give correct values; failures are reported."""
        programs = []
        for num_bytes in self.request.sizes:
            for method in self.methods:
                try:
                    programs.append(self.lower(num_bytes, method))
                except NotImplementedError as error:
                    _emit({"bytes": num_bytes, "method": method, "unsupported": str(error)})
        with ThreadPoolExecutor(COMPILERS) as pool:
            waiting = [
                {name: pool.submit(chain.compile) for name, chain in program.chains.items()}
                for program in programs
            ]
            for program, compiling in zip([*programs], waiting, strict=True):
                with _reporting_errors(program, dropped_from=programs):
                    program.chains = {name: one.result() for name, one in compiling.items()}
                    program.verify()
        return programs

    def measure(self) -> None:
        programs = self.programs()
        for _ in range(ROUNDS):  # interleaved, as the host's pace drifts
            for program in [*programs]:
                with _reporting_errors(program, dropped_from=programs):
                    program.sample()
        for num_bytes in self.request.sizes:
            here = [program for program in programs if program.answer["bytes"] == num_bytes]
            for program in here:
                _emit({**program.answer, **program.samples})
            for program, traced in zip(here, profiled(here), strict=True):
                _emit({**program.answer, **traced})
            if self.memory:
                self.memory.check_errors()
        if self.memory:
            self.memory.close()


@contextlib.contextmanager
def _reporting_errors(program: Program, dropped_from: list[Program]) -> Iterator[None]:
    """Reports an error of one method, which is dropped; the others continue."""
    try:
        yield
    except Exception as error:
        dropped_from.remove(program)
        _emit({**program.answer, "failed": f"{type(error).__name__}: {error}"[:500]})


def profiled(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """Seconds of each program's all-reduces on each GPU, and the names of their kernels."""
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
    except Exception as error:  # the wall clock times are useful without it
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
            reason = f"{wanted} all-reduces on {len(shards)} devices can't be identified in {ran}"
            found.append({"unprofiled": f"{reason}; programs: {[*map(len, devices)]}"})
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
    """Seconds of each of `count` all-reduces; none if it does not divide the number of kernels.

    An all-reduce consists of its kernels and the copies and fills right before each.
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
    """One name for XLA's psum_512_0_fusion_1, psum_513_0_fusion_1 and so on."""
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


def _emit(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    Bench(Request(**json.loads(sys.argv[1]))).measure()
