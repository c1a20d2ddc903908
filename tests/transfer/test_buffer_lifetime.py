"""Buffers of started copies in lowered programs: each outlives its copy."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Primitive

import jaxkv
from jaxkv._src.runtime import lowering
from jaxkv._src.transfer import buffer_lifetime
from tests.util.async_cases import OVERLAPPED, ids_of
from tests.util.lowered_copies import Module, Program, always_beside
from tests.util.transfer_cases import make_case

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")
CASE = make_case()


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_buffers_outlive_their_copies(seed):
    program = Program(CASE, OVERLAPPED[seed % len(OVERLAPPED)], seed)
    module = program.lowered()
    assert not module.violations(seed)
    copied = program.copied or module.returns_an_array_twice
    if program.complete and not copied and (program.plain or not program.donate_pool):
        assert not any(module.joined) and not module.boundary_waits


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_buffers_outlive_the_copy_of_a_handle_argument(seed):
    program = Program(CASE, OVERLAPPED[seed % len(OVERLAPPED)], seed)
    module = program.continued()
    assert not module.violations(seed)
    if program.complete and not program.copied and not module.returns_an_array_twice:
        assert not module.boundary_waits


def test_negative_control_lifetime_violation_is_detected():
    with mock.patch.object(buffer_lifetime, "_decide", always_beside):
        programs = [(seed, Program(CASE, OVERLAPPED[0], seed)) for seed in range(60)]
        started = sum(bool(program.lowered().violations(seed)) for seed, program in programs)
        taken = sum(bool(program.continued().violations(seed)) for seed, program in programs)
    assert started >= 10 and taken >= 3


def lowered(step, named, *, donate: tuple[int, ...] = (1,)) -> Module:
    _, ids = ids_of(CASE, 4, named)
    args = CASE.pool(), CASE.cache(), jnp.float32(1), *ids
    return Module(jax.jit(step, donate_argnums=donate).lower(*args))


def start(named, direction, pool, cache, ids):
    if direction == "load":
        return jaxkv.start_load(pool, cache, *ids, implementation=named)
    return jaxkv.start_store(pool, cache, *ids, implementation=named)


def test_exported_program_stays_in_its_safe_form(named):
    """The program that calls it may drop arrays of the copy."""
    names = ("plan_pairs", "start_copy", "start_copy_dma", "move_ticket", "wait_copy")
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(f"jaxkv_{name}") for name in names]
    _, ids = ids_of(CASE, 4, named)

    def step(pool, cache, *ids):
        return jax.tree.leaves(start(named, "load", pool, cache, ids))

    exported = jax.export.export(jax.jit(step), disabled_checks=unchecked)
    assert "joined = true" in exported(CASE.pool(), CASE.cache(), *ids).mlir_module()


SAME = jax.jit(lambda t: t)
CROSSINGS = {
    "inner jit": lambda t, x: jax.jit(lambda t: (t.wait(0), t)[1])(t),
    "inlined jit": lambda t, x: jax.jit(lambda t: (t.wait(0), t)[1], inline=True)(t),
    "tree.map": lambda t, x: jax.tree.map(lambda leaf: leaf, t),
    "one jit, called again": lambda t, x: SAME(SAME(SAME(t))),
    "barrier": lambda t, x: jax.lax.optimization_barrier(t),
    "cond": lambda t, x: jax.lax.cond(x > 0, lambda t: t, lambda t: t, t),
    "scan": lambda t, x: jax.lax.scan(lambda t, _: (t, None), t, length=3)[0],
    "checkpoint": lambda t, x: jax.checkpoint(lambda t: (t.wait(0), t)[1])(t),
}


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("crossing", CROSSINGS.values(), ids=CROSSINGS)
@pytest.mark.parametrize("end", ["dropped", "finished", "returned"])
def test_copy_across_a_boundary_is_protected_and_asynchronous(direction, crossing, end, named):
    def step(pool, cache, x, *ids):
        started = crossing(start(named, direction, pool, cache, ids), x)
        if end == "dropped":
            return started.wait(1)[0].sum(), [jnp.ones((9, 4, 2, 16))] * 6
        if end == "finished":
            return getattr(started, "pool", None), started.cache
        return started

    module = lowered(step, named, donate=(1,) if direction == "load" else (0, 1))
    assert not module.violations(0)
    delayed = any(module.joined) or module.boundary_waits > 0
    assert delayed == (end == "dropped")


def test_deep_model_with_an_inner_jit_per_layer(named):
    """As many pytree boundaries as layers: the chain of aliases is longer than Python's stack."""
    case = make_case(num_layers=80, kind="mla", dtype="int8")
    _, ids = ids_of(case, 4, named)

    def one(layer, loading, x):
        return loading, x + loading.wait(layer)[0].sum()

    def step(pool, cache, x, *ids):
        loading = start(named, "load", pool, cache, ids)
        for layer in range(case.spec.num_layers):
            loading, x = jax.jit(partial(one, layer))(loading, x)
        return x, loading.cache

    args = case.pool(), case.cache(), jnp.int32(0), *ids
    module = Module(jax.jit(step, donate_argnums=1).lower(*args))
    assert not any(module.joined) and not module.boundary_waits


def test_wait_in_one_branch_does_not_protect(named):
    def step(pool, cache, x, *ids):
        loading = start(named, "load", pool, cache, ids)
        done = jax.lax.cond(x > 0, lambda t: t.cache, lambda t: cache, loading)
        return done.layers[0]

    module = lowered(step, named, donate=())
    assert any(module.joined) or module.boundary_waits
    assert not module.violations(0)


def test_wait_in_each_branch_protects(named):
    def step(pool, cache, x, *ids):
        loading = start(named, "load", pool, cache, ids)
        return jax.lax.cond(x > 0, lambda t: t.cache, lambda t: t.cache, loading)

    module = lowered(step, named)
    assert not any(module.joined) and not module.boundary_waits


def test_pool_overwritten_after_an_inner_jit_is_read_first(named):
    """The inner program does not take the pool, so its waits can't delay the overwrite."""

    def step(pool, cache, x, *ids):
        loading = start(named, "load", pool, cache, ids)
        arrays = jax.jit(lambda loading: loading.cache)(loading)
        pool = jaxkv.store_pages(pool, CASE.cache() if x is None else arrays, *ids)
        return pool, arrays

    donated, not_donated = (lowered(step, named, donate=donate) for donate in ((0, 1), (1,)))
    assert any(donated.joined) or donated.boundary_waits
    assert not any(not_donated.joined) and not not_donated.boundary_waits


@pytest.mark.parametrize("direction", ["load", "store"])
def test_wait_in_another_program_with_a_plan_covers_all_layers(direction, named):
    """A result of the plan's shape reuses its memory, while the copies of other layers read it."""
    _, ids = ids_of(CASE, 4, named)
    started = jax.eval_shape(
        jax.jit(partial(start, named, direction)), CASE.pool(), CASE.cache(), ids
    )
    plan = started._plan

    def step(started):
        return started.wait(0)[0].sum(), plan and jnp.zeros(plan.shape, plan.dtype)

    module = Module(jax.jit(step, donate_argnums=0).lower(started), started)
    assert not module.violations(0)
    assert ("segment = 2 " in module.text) == (plan is not None)


def test_program_without_analysis_waits_at_its_start(named):
    with mock.patch.object(lowering, "_LOWERED", "another"):
        module = lowered(
            lambda pool, cache, x, *ids: start(named, "load", pool, cache, ids).cache, named
        )
    lowering._pending.entries.clear()
    assert all(module.joined)


def test_program_after_a_failed_lowering_is_analysed(named):
    without_lowering = Primitive("without_lowering")
    without_lowering.def_abstract_eval(lambda x: x)

    def step(pool, cache, x, *ids, fails=True):
        cache = start(named, "load", pool, cache, ids).cache
        return cache, without_lowering.bind(x) if fails else x

    with pytest.raises(NotImplementedError):
        lowered(step, named)
    assert not any(lowered(partial(step, fails=False), named).joined)
