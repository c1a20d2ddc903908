"""Cost of saving recurrent states: `python -m bench.recurrent`.

The call alone, on states of two hybrid models: with no row of the batch at a block boundary, as in
nearly every step, and with all rows at one. Calls are chained within one program, so the time per
call is GPU time without dispatch. Then entire steps, with four methods: see
bench/recurrent_steps.py.
"""

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench import recurrent_steps as steps
from bench.harness import peak_bandwidth, timestamps
from bench.harness.records import Results, arguments
from bench.recurrent_steps import DRAFTS, MAX_BYTES, MODELS, Model, scrambled
from jaxkv.metadata import BatchMetadata
from jaxkv.recurrent import StateKind

COLUMNS = 3  # the boundary's block, the running state's, and that of the accepted draft
IDLE_CALLS = 64
IDLE_WANTED_US, SHARE_WANTED = 5.0, 0.8


class Case:
    """A batch with all rows at a boundary, or none, and its states."""

    def __init__(self, model: Model, batch: int, conv: StateKind, *, crosses: bool):
        num_blocks = 1 + COLUMNS * (batch if crosses else 1)
        shapes = model.shapes(conv)
        per_layer = num_blocks * sum(2 * math.prod(shape) for shape in shapes.values())
        fitting = MAX_BYTES[jax.default_backend()] // per_layer
        self.layers = max(1, min(model.layers, fitting))
        self.kinds = list(shapes)
        self.states = [
            [scrambled((num_blocks, *shape)) for shape in shapes.values()]
            for _ in range(self.layers)
        ]
        # One token before the boundary if nothing more is accepted; or far from it.
        certain = model.block_size - 1 if crosses else model.block_size // 2
        ids = np.random.default_rng(0).permutation(num_blocks - 1)[: COLUMNS * batch] + 1
        self.table = np.resize(ids, (batch, COLUMNS))
        self.batch = BatchMetadata.from_host(
            [1 + DRAFTS] * batch,
            [certain + DRAFTS] * batch,
            self.table,
            max_num_reqs=batch,
            max_num_tokens=batch * (1 + DRAFTS),
            max_blocks=COLUMNS,
            block_size=model.block_size,
        )
        self.batch = jax.tree.map(jnp.asarray, self.batch)
        self.bytes = batch * self.layers * model.moved_bytes(bias=1) if crosses else 0
        self.calls = 2 if crosses else IDLE_CALLS

    def seconds(self) -> float:
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
                    states, batch, counts, kinds=[self.kinds] * self.layers, num_drafts=drafts
                )
            return states, timestamps.stamp(counts, 1)

        timed, (self.states, _) = timestamps.measure(
            lambda state: program(state, self.batch, drafts), (self.states, accepted)
        )
        self.check()
        span = timed.handlers if math.isnan(timed.gpu) else timed.gpu
        return span / self.calls

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
    name = f"{model.name}, {case.layers} layers, batch {batch}: no row at a block boundary"
    microseconds = case.seconds() * 1e6
    results.row(name, "time per call", "us", microseconds)
    print(f"{name}: {microseconds:.2f} us")
    if batch == 1024:
        results.target(name, microseconds, "<=", IDLE_WANTED_US, "us")


def crossing(results: Results, model: Model, batch: int, conv: StateKind) -> None:
    """All rows at a boundary."""
    case = Case(model, batch, conv, crosses=True)
    states = f"{model.name}, {case.layers} layers, {conv.name}"
    name = f"{states}, batch {batch}: all rows at a block boundary"
    seconds = case.seconds()
    rate = case.bytes / seconds / 1e9
    limit = peak_bandwidth.device_copy()
    results.row(name, "time per call", "us", seconds * 1e6)
    results.row(name, "copy throughput", "GB/s", rate, peak=limit)
    print(f"{name}: {seconds * 1e6:.1f} us, {rate:.0f} GB/s, {rate / limit[1]:.2f} of {limit[0]}")
    if batch == 1024:
        results.target(name, rate / limit[1], ">=", SHARE_WANTED, "of device copy bandwidth")


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    results = Results("recurrent")
    small = flags.quick or jax.default_backend() == "cpu"
    for model in MODELS:
        for batch in (1,) if small else (1, 16, 64, 1024):
            idle(results, model, batch)
            for conv in (StateKind.CONV_SD, StateKind.CONV_DS):
                crossing(results, model, batch, conv)
    steps.measure(results, quick=small)
    results.save(flags.out)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
