"""`all_reduce`: bitwise results, order, and skewed ranks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.collectives.symmetric_memory import LOW_LATENCY_BYTES
from jaxkv._src.tuning.all_reduce_table import WORLD_SIZES
from tests.util import hooks
from tests.util.ranks import (
    AXIS,
    MAX_BYTES,
    METHODS,
    MULTICAST,
    NATIVE,
    ORDERED,
    TILED,
    assert_sums,
    implementation_of,
    late,
    memory_of,
    mesh_of,
    on_ranks,
    operand,
    sums,
)

pytestmark = [pytest.mark.multigpu, pytest.mark.usefixtures("multicast")]

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def tiled_memories():
    """Likewise, with LL buffers so small that two_shot is split into tiles."""
    world_sizes = [n for n in WORLD_SIZES if n <= jax.device_count()]
    made = {n: memory_of(n, max_bytes=MAX_BYTES, method=TILED) for n in world_sizes}
    yield made
    for memory in made.values():
        memory.check_errors()
        memory.close()


def assert_same_bits(got, want: np.ndarray) -> None:
    """Every rank's row has the bits of `want`."""
    assert {row.tobytes() for row in np.asarray(got)} == {want.tobytes()}


# ---------------------------------------------------------------------------------------------
# Results


def sizes(itemsize: int):
    """Numbers of elements near word, warp, block, buffer and round boundaries."""
    about = [0, 1, 16, 512 * 16, MAX_BYTES // 2, MAX_BYTES]
    near = st.sampled_from(about).flatmap(lambda n: st.integers(n - 18, n + 18))
    limit = MAX_BYTES // itemsize
    return st.one_of(near.map(lambda n: min(max(n // itemsize, 0), limit)), st.integers(0, limit))


@settings(max_examples=100)
@given(st.data(), st.sampled_from(WORLD_SIZES), st.sampled_from(DTYPES), st.sampled_from(METHODS))
def test_integer_sums_of_any_size_are_exact(
    memories, tiled_memories, data, world_size, dtype, method
):
    if world_size not in memories:
        return
    memory = (tiled_memories if method == TILED else memories)[world_size]
    n = data.draw(sizes(jnp.dtype(dtype).itemsize))
    x = operand(world_size, (n,), dtype, seed=n)
    assert_sums(sums(memory, method)(x), x)


def rounded(world_size: int, dtype: str) -> np.ndarray:
    """Values whose sum depends on the order."""
    rng = np.random.default_rng(1)
    scale = 10.0 ** rng.integers(-2, 4, (world_size, 777))
    return (rng.normal(size=(world_size, 777)) * scale).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("method", [*ORDERED, TILED])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_accumulation_is_float32_in_rank_order(memories, tiled_memories, world_size, dtype, method):
    mesh_of(world_size)
    x = rounded(world_size, dtype)
    want = x[0].astype(np.float32)
    for row in x[1:]:
        want = want + row.astype(np.float32)
    step = sums((tiled_memories if method == TILED else memories)[world_size], method)
    for _ in range(3):
        assert_same_bits(step(x), want.astype(x.dtype))


@pytest.mark.parametrize("algorithm", MULTICAST)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_multimem_accumulates_in_float32_and_is_identical_on_all_ranks(
    memories, world_size, dtype, algorithm
):
    mesh_of(world_size)
    x = rounded(world_size, dtype)
    got = np.asarray(sums(memories[world_size], algorithm)(x))
    assert_same_bits(got, got[0])
    exact = x.astype(np.float64).sum(0)
    largest = np.abs(x.astype(np.float64)).sum(0)
    half_a_step = jnp.finfo(x.dtype).eps / 2
    bound = np.abs(exact) * half_a_step + largest * 2.0**-22
    assert (np.abs(got[0].astype(np.float64) - exact) <= bound * 1.01).all()


@pytest.mark.parametrize("algorithm", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros_and_nans_are_preserved(memories, dtype, algorithm):
    """Also the NaN that marks a word as not yet arrived."""
    memory = memories[2]
    bits = np.uint32 if dtype == "float32" else np.uint16
    ones = np.iinfo(bits).max
    minus_zero, inf, minus_inf = (
        np.array(v, jnp.dtype(dtype)).view(bits) for v in (-0.0, np.inf, -np.inf)
    )
    rows = [  # the first word is sent before the others
        [ones, minus_zero, minus_zero, ones, inf, minus_inf, ones],
        [0, minus_zero, 0, 0, 0, inf, ones],
    ]
    x = np.array(rows, bits).repeat(16, axis=1).view(jnp.dtype(dtype))
    got = np.asarray(sums(memory, algorithm)(x))
    assert got[0].tobytes() == got[1].tobytes()
    first = [str(v) for v in got[0].reshape(7, 16)[:, 0].astype(np.float32)]
    assert first == ["nan", "-0.0", "0.0", "nan", "inf", "nan", "nan"]


def test_varying_sizes_share_one_memory(memories):
    """The receive buffer still contains data of a larger message."""
    for memory in memories.values():
        for round_, n in enumerate([5, 4096, 3, 1000, 4096, 1, 7, 2048, 64] * 2):
            x = operand(memory.world_size, (n,), "float32", round_)
            assert_sums(sums(memory, NATIVE[round_ % len(NATIVE)])(x), x)
            assert_sums(sums(memory, "low_latency")(x), x)


@pytest.mark.parametrize("algorithm", ["two_shot", *MULTICAST])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_messages_of_many_chunks(world_size, algorithm):
    """Each receive buffer is reused in one call; the last chunk ends within a rank's part."""
    num_bytes = 9 * LOW_LATENCY_BYTES // 2
    with memory_of(world_size, max_bytes=2 * num_bytes) as memory:
        step = sums(memory, algorithm)
        for round_, n in enumerate([num_bytes // 4 + 5, 7, num_bytes // 4 - 100_000]):
            x = operand(world_size, (n,), "float32", round_)
            assert_sums(step(x), x)


@pytest.mark.parametrize("max_bytes", [4, 20, 36, 48, 100, 1000])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_small_memory_supports_its_max_bytes(world_size, max_bytes):
    """Parts that exceed half an LL buffer require tiles."""
    with memory_of(world_size, max_bytes=max_bytes) as memory:
        x = operand(world_size, (max_bytes // 4,), "float32")
        assert_sums(sums(memory, "two_shot")(x), x)


@pytest.mark.parametrize("algorithm", NATIVE)
def test_unaligned_slices(memories, algorithm):
    """XLA may pass the address of a slice, which is aligned to the element, not to a word."""
    memory = memories[2]

    def step(x):
        return [
            jaxkv.all_reduce(memory, row, AXIS, implementation=algorithm)
            for row in (x[0], x[1], x[2:])
        ]

    x = operand(2, (5, 333), "bfloat16")
    for got, rows in zip(on_ranks(memory, step)(x), (x[:, 0], x[:, 1], x[:, 2:]), strict=True):
        assert_sums(got, rows)


# ---------------------------------------------------------------------------------------------
# In a step


def test_pytrees_and_multiple_memories(memories):
    memory = memories[2]

    def step(x):
        a = jaxkv.all_reduce(memory, {"a": x, "b": (x * 2, x[:3])}, AXIS)
        b = jaxkv.all_reduce(other, x * 3, AXIS)
        c = jaxkv.all_reduce(memory, x * 4, AXIS, implementation="two_shot")
        return a, b, c

    x = operand(2, (100,), "float32")
    with memory_of(2) as other:
        a, b, c = jax.block_until_ready(on_ranks(memory, step)(x))
    assert_sums(a["a"], x)
    assert_sums(a["b"][0], x * 2)
    assert_sums(a["b"][1], x[:, :3])
    assert_sums(b, x * 3)
    assert_sums(c, x * 4)


@pytest.mark.parametrize("algorithm", NATIVE)
def test_scan(memories, algorithm):
    memory = memories[2]

    def step(x):
        def body(carry, i):
            total = jaxkv.all_reduce(memory, carry + i, AXIS, implementation=algorithm)
            return carry, total

        return jax.lax.scan(body, x, jnp.arange(20, dtype=x.dtype))[1]

    x = operand(2, (33,), "float32")
    got = np.asarray(on_ranks(memory, step)(x))
    assert_sums(got, x[:, None] + np.arange(20, dtype=np.float32)[:, None])


def test_vmap_and_inner_jit(memories):
    memory = memories[2]

    @jax.jit
    def inner(row):
        return jaxkv.all_reduce(memory, row, AXIS), jaxkv.all_reduce(memory, row * 2, AXIS)

    x = operand(2, (5, 7), "float32")
    for body in (jax.vmap(inner), inner):
        once, twice = on_ranks(memory, body)(x)
        assert_sums(once, x)
        assert_sums(twice, x * 2)


@pytest.mark.parametrize("rows_axis", [0, 1])
def test_vmap_is_one_batched_call(memories, rows_axis):
    """Chosen by their total bytes: rows that fit one by one may exceed a buffer together."""
    memory = memories[2]
    rows, columns = 8, MAX_BYTES // 4 // 4
    x = operand(2, (rows, columns), "float32")

    def step(x, implementation=None):
        reduce = partial(jaxkv.all_reduce, memory, axis_name=AXIS, implementation=implementation)
        return jax.vmap(reduce, in_axes=rows_axis)(x if rows_axis == 0 else x.T)

    assert_sums(on_ranks(memory, step)(x), x)
    with pytest.raises(NotImplementedError, match=f"{x[0].nbytes} bytes exceed max_bytes = "):
        on_ranks(memory, partial(step, implementation="two_shot"))(x)
    small = x[:, :, :5]
    step_of_small = on_ranks(memory, partial(step, implementation="low_latency"))
    assert_sums(step_of_small(small), small)
    text = step_of_small.lower(small).as_text()
    assert text.count("custom_call @jaxkv_all_reduce") == 1


def test_empty_arrays_are_replicated(memories):
    memory = memories[2]
    step = jax.shard_map(
        lambda x: jaxkv.all_reduce(memory, x[:, :0], AXIS),
        mesh=memory.mesh, in_specs=jax.P(AXIS), out_specs=jax.P(),
    )  # fmt: skip
    assert jax.jit(step)(operand(2, (3,), "float32")).shape == (1, 0)


@pytest.mark.parametrize("check_vma", [False, True])
def test_derivatives_equal_psum(memories, check_vma):
    memory = memories[2]
    x, tangent = (operand(2, (10,), "float32", seed) for seed in (1, 2))

    def derivatives(reduce):
        step = on_ranks(memory, lambda x: jnp.sin(reduce(x)) * reduce(x * x), check_vma=check_vma)
        value, forward = jax.jvp(step, (x,), (tangent,))
        return value, forward, jax.grad(lambda x: step(x).sum())(x)

    actual = derivatives(lambda x: jaxkv.all_reduce(memory, x, AXIS))
    expected = derivatives(lambda x: jax.lax.psum(x, AXIS))
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_repeated_traces_do_not_leak(memories):
    memory = memories[2]
    with jax.checking_leaks():
        sums(memory, "low_latency")(operand(2, (8,), "float32"))


# ---------------------------------------------------------------------------------------------
# Skewed ranks


def delayed(memory, method):
    """All-reduce in which one rank is late."""

    def step(x, late_rank):
        x = late(x, late_rank)
        return jaxkv.all_reduce(memory, x, AXIS, implementation=implementation_of(method))

    return on_ranks(memory, step)


def wrong_rounds(memory, method, *, waits: bool = True, rounds: int = 12) -> int:
    step, wrong = delayed(memory, method), 0
    for round_ in range(rounds):
        if not waits:
            hooks.preset(memory, 0, ahead=1 << 20)
        x = operand(memory.world_size, (500,), "float32", round_)
        late_rank = np.full(memory.world_size, round_ % memory.world_size, np.int32)
        wrong += not (np.asarray(step(x, late_rank)) == x.sum(0)).all()
    return wrong


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("waits", [True, False], ids=["wait", "no wait"])
def test_delayed_rank_does_not_change_results(method, waits):
    with memory_of(2, method=method) as memory:
        wrong = wrong_rounds(memory, method, waits=waits)
    assert wrong == 0 if waits else wrong > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("waits", [True, False], ids=["wait", "no wait"])
def test_delayed_threads_do_not_change_results(method, waits):
    """For example after sending and before a word is reset."""
    with memory_of(2, method=method) as memory:
        step, wrong = sums(memory, method), 0
        hooks.preset(memory, 0, stall_s=1e-3)
        for round_ in range(12):
            if not waits:
                hooks.preset(memory, 0, ahead=1 << 20, stall_s=1e-3)
            x = operand(2, ((1, 9000, 500)[round_ % 3],), "float32", round_)
            wrong += not (np.asarray(step(x)) == x.sum(0)).all()
    assert wrong == 0 if waits else wrong > 0


@pytest.mark.parametrize("method", ["one_shot", *MULTICAST, TILED])  # those that count epochs
@pytest.mark.parametrize("epoch", [2**31, 2**32, 2**63, 2**64], ids="2^{0:.0f}".format)
def test_epoch_overflow_wraps(method, epoch):
    with memory_of(2, method=method) as memory:
        hooks.preset(memory, epoch - 9)
        assert wrong_rounds(memory, method) == 0
