"""What only GPUs show of `all_reduce`: steps that are replayed as CUDA graphs."""

import jax
import numpy as np
import pytest
from ranks import (
    AXIS,
    NATIVE,
    TILED,
    WAYS,
    assert_sums,
    implementation_of,
    memory_of,
    on_ranks,
    operand,
)

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]

CALLS = 6  # XLA makes a graph of five operations or more
ROUNDS = 24


def chain(memory, way):
    def step(x):
        for i in range(CALLS):
            x = memory.all_reduce(x, AXIS, implementation=implementation_of(way)) * 0.5 + i
        return x

    return on_ranks(memory, step)


def expected(x: np.ndarray) -> np.ndarray:
    """After one sum both ranks have the same, and half of its double is itself."""
    return np.broadcast_to(x.sum(0) * 0.5 + sum(range(CALLS)), x.shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [100, 12_345])
def test_replays_see_new_operands(way, n):
    with memory_of(2, max_bytes=1 << 20, way=way) as memory:
        step = chain(memory, way)
        for round_ in range(ROUNDS):
            x = operand(2, (n,), "float32", round_)
            assert np.array_equal(np.asarray(step(x)), expected(x)), round_
        memory.check()
    with pytest.raises(jax.errors.JaxRuntimeError, match="SymmetricMemory was closed"):
        jax.block_until_ready(step(x))


@pytest.mark.parametrize("way", WAYS)
def test_a_replayed_step_and_others_take_turns(way):
    """Epochs and halves go on where the other executable left them."""
    with memory_of(2, max_bytes=1 << 20, way=way) as memory:
        others = [name for name in NATIVE if way != TILED or name != "low_latency"]
        steps = [chain(memory, name) for name in (way, *others)]
        for round_ in range(ROUNDS):
            x = operand(2, (1 + 997 * (round_ % 5),), "float32", round_)
            outputs = [step(x) for step in steps]
            for output in outputs:
                assert np.array_equal(np.asarray(output), expected(x)), round_


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_bytes", [1 << 20, (8 << 20) + 6, 64 << 20])
def test_large_messages(dtype, num_bytes):
    with memory_of(2, max_bytes=64 << 20) as memory:
        x = operand(2, (num_bytes // np.dtype(jax.numpy.dtype(dtype)).itemsize,), dtype)
        reduce = on_ranks(memory, lambda x: memory.all_reduce(x, AXIS, implementation="two_shot"))
        for _ in range(3):
            assert_sums(reduce(x), x)
