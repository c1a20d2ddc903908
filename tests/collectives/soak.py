"""Soak test of all-reduce with exact checks: `python -m tests.collectives.soak --seconds 600`.

Programs of random calls (two communicators, all algorithms, dtypes, sizes from one element to the
largest) run in random order on all devices; some ranks are delayed by a random time before a call.
The devices compare every result with the expected sum, exactly. Exits with code 1 at the first
mismatch.
"""

import argparse
import collections
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.collectives.all_reduce import DTYPES, Implementation
from jaxkv._src.collectives.symmetric_memory import SymmetricMemory
from jaxkv._src.tuning.all_reduce_table import WORLD_SIZES

AXIS = "tp"
ROUNDS_PER_PROGRAM = 20  # before another one is added
PROGRAMS = 64
IN_FLIGHT = 8  # rounds that the host runs ahead
LONGEST_DELAY = 2000  # products of small matrices
MAX_BYTES = {"cpu": 1 << 20, "gpu": 64 << 20}


class Call(NamedTuple):
    memory: SymmetricMemory
    algorithm: Implementation
    dtype: str
    size: int  # elements


def random_call(rng: random.Random, memories: Sequence[SymmetricMemory]) -> Call:
    memory, dtype = rng.choice(memories), rng.choice(DTYPES)
    limits: list[tuple[Implementation, int]] = [
        ("low_latency", memory.low_latency_bytes),
        ("one_shot", memory.slot_bytes),
        ("two_shot", memory.max_bytes),
    ]
    algorithm, limit = rng.choice(limits)
    largest = min(limit, memory.max_bytes) // jnp.dtype(dtype).itemsize
    size = int(largest ** rng.random())  # log-uniform
    return Call(memory, algorithm, dtype, size)


def operand(size: int, rank: jax.Array | int, seed: jax.Array) -> jax.Array:
    """Integers, whose sums over 8 ranks are exact in every dtype."""
    i = jnp.arange(size, dtype=jnp.int32)
    return (i * 7 + rank * 11 + seed * 13) % 31 - 15


def delayed_zero(delay: jax.Array) -> jax.Array:
    """Zero, after a delay."""
    square = jnp.full((64, 64), 1 / 64, jnp.float32)
    waste = jax.lax.fori_loop(0, delay, lambda _, y: y @ square, square)
    return (waste[0, 0] * 0).astype(jnp.int32)


def program(
    mesh: jax.sharding.Mesh, calls: Sequence[Call]
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`(wrong[world], over[world], seed, delays[world, calls]) -> (wrong[world], over[world])`.

    `wrong` counts mismatches and is carried from round to round; `over` is returned summed over the
    devices.
    """
    ranks = range(mesh.size)

    def step(
        wrong: jax.Array, over: jax.Array, seed: jax.Array, delays: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rank = jax.lax.axis_index(AXIS)
        after = jnp.minimum(wrong, 0)  # zero; orders the round after the previous one
        for number, (memory, algorithm, dtype, size) in enumerate(calls):
            x = operand(size, rank, seed + number) + delayed_zero(delays[rank, number]) + after
            got = jaxkv.all_reduce(memory, x.astype(dtype), AXIS, implementation=algorithm)
            want = sum(operand(size, r, seed + number) for r in ranks)
            wrong += (got.astype(jnp.float32) != want).sum(dtype=jnp.int32)
        over = jaxkv.all_reduce(calls[0].memory, over, AXIS, implementation="one_shot")
        return wrong + jnp.minimum(over, 0).astype(jnp.int32), over

    rows, everywhere = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (rows, rows, everywhere, everywhere)
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
    )


def soak(mesh: jax.sharding.Mesh, seconds: float, *, max_bytes: int, seed: int = 0) -> int:
    """The number of checked all-reduces, all of them correct.

    In a multi-process run each process calls this.

    Raises:
      ArithmeticError: a wrong value, with its calls.
      PeerTimeoutError: a rank timed out.
    """
    rng = random.Random(seed)  # the same in all processes
    create = partial(SymmetricMemory.create, mesh, AXIS)
    programs: list[tuple[list[Call], Callable[..., tuple[jax.Array, jax.Array]]]] = []
    running: collections.deque[tuple[list[Call], jax.Array, jax.Array]] = collections.deque()
    reductions, begin = 0, time.monotonic()
    with create(max_bytes=max_bytes) as large, create(max_bytes=max_bytes // 64) as small:
        wrong = by_rank(mesh, np.zeros(mesh.size, np.int32))
        for round_ in range(sys.maxsize):
            if round_ % ROUNDS_PER_PROGRAM == 0 and len(programs) < PROGRAMS:
                calls = [random_call(rng, (large, small)) for _ in range(rng.randint(1, 6))]
                programs.append((calls, program(mesh, calls)))
            calls, step = rng.choice(programs)
            expired = time.monotonic() - begin > seconds  # by this process's clock
            over = by_rank(mesh, np.full(mesh.size, expired, np.float32))
            delays = np.zeros((mesh.size, len(calls)), np.int32)
            late_rank, late_call = rng.randrange(mesh.size), rng.randrange(len(calls))
            delays[late_rank, late_call] = rng.randint(0, LONGEST_DELAY)
            wrong, over = step(wrong, over, np.int32(round_), delays)
            running.append((calls, wrong, over))
            if len(running) < IN_FLIGHT:
                continue
            reductions += checked(*running[0][:2])
            if largest(running.popleft()[2]) > 0:  # the same in all processes
                break
        reductions += sum(checked(calls, wrong) for calls, wrong, _ in running)
        large.check_errors()
        small.check_errors()
    return reductions


def by_rank(mesh: jax.sharding.Mesh, rows: np.ndarray) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)


def largest(rows: jax.Array) -> float:
    """Maximum over this process's ranks."""
    return max(float(shard.data[0]) for shard in rows.addressable_shards)


def checked(calls: Sequence[Call], wrong: jax.Array) -> int:
    """The number of all-reduces, after they have been checked."""
    if values := int(largest(wrong)):
        what = [f"{call.algorithm} of {call.dtype}[{call.size}]" for call in calls]
        raise ArithmeticError(f"{values} values are wrong after {', '.join(what)}")
    return len(calls) + 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of sizes, algorithms and delays")
    flags = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 4)
    world = max((n for n in WORLD_SIZES if n <= jax.device_count()), default=0)
    if not world:
        print(f"needs {WORLD_SIZES[0]} devices, has {jax.device_count()}", file=sys.stderr)
        return 2
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:world]), (AXIS,))
    max_bytes = MAX_BYTES[jax.default_backend()]
    try:
        reductions = soak(mesh, flags.seconds, max_bytes=max_bytes, seed=flags.seed)
    except ArithmeticError as error:
        print(error, file=sys.stderr)
        return 1
    device = mesh.devices.flat[0].device_kind
    print(f"{reductions} all-reduces in {flags.seconds:g} s on {world} x {device}, all exact")
    return 0


if __name__ == "__main__":
    sys.exit(main())
