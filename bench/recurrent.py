"""Cost of saving recurrent states: `python -m bench.recurrent`.

The call alone, for 1024 rows and the states of two hybrid models: with no row of the batch at a
block boundary, as in nearly every step, and with all rows at one. Calls are chained within one
program, so the time per call is GPU time without dispatch. Then entire steps, with four methods:
see bench/recurrent_steps.py.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import peak_bandwidth, timestamps, timing
from bench.harness.main import Flags, benchmark
from bench.harness.records import Results
from bench.recurrent_steps import DRAFTS, MODELS, Model, batch_of, measure_steps
from jaxkv.metadata import BatchMetadata
from jaxkv.recurrent import StateKind

COLUMNS = 3  # the boundary's block, the running state's, and that of the accepted draft
BATCH, IDLE_CALLS = 1024, 64
IDLE_WANTED_US, SHARE_WANTED = 5.0, 0.8


class Case:
    """A batch with all rows at a boundary, or none, and its states."""

    def __init__(self, model: Model, batch: int, conv: StateKind, *, crosses: bool):
        num_blocks = 1 + COLUMNS * (batch if crosses else 1)
        self.kinds = tuple(model.shapes(conv))
        self.states = model.states(num_blocks, conv)
        # One token before the boundary if nothing more is accepted; or far from it.
        certain = model.block_size - 1 if crosses else model.block_size // 2
        ids = np.random.default_rng(0).permutation(num_blocks - 1)[: COLUMNS * batch] + 1
        self.table = np.resize(ids, (batch, COLUMNS))
        made = batch_of(model, np.full(batch, certain - 1), self.table)
        self.batch: BatchMetadata = jax.tree.map(jnp.asarray, made)
        self.bytes = batch * len(self.states) * model.moved_bytes(bias=1) if crosses else 0
        self.calls = 2 if crosses else IDLE_CALLS

    def seconds(self) -> timing.Figure:
        """Seconds per call; on the GPU, or on the host without one."""
        rows = self.batch.max_num_reqs
        drafts = jnp.full(rows, DRAFTS, jnp.int32)
        accepted = jnp.full(rows, 2, jnp.int32)

        @functools.partial(jax.jit, donate_argnums=0)
        def program(state: Any, batch: BatchMetadata, drafts: jax.Array) -> Any:
            states, counts = state
            counts = timestamps.stamp(counts, 0)
            for _ in range(self.calls):
                states, counts = jaxkv.recurrent.align_postprocess(
                    states, batch, counts, kinds=[self.kinds] * len(states), num_drafts=drafts
                )
            return states, timestamps.stamp(counts, 1)

        timed, (self.states, _) = timestamps.measure(
            lambda state: program(state, self.batch, drafts), (self.states, accepted)
        )
        self.check()
        return timed.device / self.calls

    def check(self) -> None:
        """Raises AssertionError if a boundary's block does not contain the expected state."""
        jaxkv.check_errors(self.states)
        temporal = self.states[-1][1]
        saved, source = temporal[self.table[-1, 0]], temporal[self.table[-1, 2]]
        if bool((saved == source).all()) is not (self.bytes > 0):
            raise AssertionError("the copies are wrong")


def idle(results: Results, model: Model, batch: int) -> None:
    """No row at a boundary."""
    case = Case(model, batch, StateKind.CONV_SD, crosses=False)
    name = f"{model.name}, {len(case.states)} layers, batch {batch}: no row at a block boundary"
    microseconds = case.seconds() * 1e6
    results.row(name, "time per call", "us", microseconds)
    if batch == BATCH:
        results.target(name, microseconds, "<=", IDLE_WANTED_US, "us")


def crossing(results: Results, model: Model, batch: int, conv: StateKind) -> None:
    """All rows at a boundary."""
    case = Case(model, batch, conv, crosses=True)
    states = f"{model.name}, {len(case.states)} layers, {conv.name}"
    name = f"{states}, batch {batch}: all rows at a block boundary"
    seconds, limit = case.seconds(), peak_bandwidth.device_copy()
    rate = case.bytes / seconds / 1e9
    results.row(name, "time per call", "us", seconds * 1e6)
    results.row(name, "copy throughput", "GB/s", rate, limit)
    if batch == BATCH:
        results.target(name, rate / limit[1], ">=", SHARE_WANTED, "of device copy bandwidth")


def measure(results: Results, flags: Flags) -> None:
    batch = 1 if flags.quick else BATCH
    for model in MODELS:
        idle(results, model, batch)
        for conv in (StateKind.CONV_SD, StateKind.CONV_DS):
            crossing(results, model, batch, conv)
    measure_steps(results, quick=flags.quick)


main = benchmark("recurrent", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
