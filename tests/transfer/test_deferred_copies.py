"""Which programs leave a part of a copy by the copy engine to the waits for it.

Lowered for a GPU, not executed. What the handlers do: test_segmented_copies.py.
"""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.transfer import async_calls, buffer_lifetime, dispatch
from tests.util.array_cases import random_arrays
from tests.util.async_cases import ids_of
from tests.util.gpu_compiler import H200
from tests.util.lifetime_interpreter import ENQUEUING_WAIT, WAIT
from tests.util.lowered_copies import Module, Program
from tests.util.transfer_cases import make_case

pytestmark = [pytest.mark.cpu_only, pytest.mark.filterwarnings("ignore:Some donated buffers")]
CASE = make_case(num_layers=4)
LAST = CASE.spec.num_layers - 1


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "_machine", lambda: H200)
    # As for many pages: the start enqueues one layer.
    monkeypatch.setattr(async_calls, "_DESCRIPTORS_AHEAD", 1)


def begin(direction, pool, cache, ids, named="dma"):
    start = {"load": jaxkv.start_load, "store": jaxkv.start_store}[direction]
    return start(pool, cache, *ids, implementation=named)


def lowered(step, direction="load", named="dma") -> Module:
    """The program of `step(handle, x)`."""
    _, ids = ids_of(CASE, 4, named)

    def program(pool, cache, x, *ids):
        return step(begin(direction, pool, cache, ids, named), x)

    donate = (1,) if direction == "load" else (0, 1)
    args = CASE.pool(), CASE.cache(), jnp.float32(1), *ids
    return Module(jax.jit(program, donate_argnums=donate).lower(*args))


def targets(module: Module) -> set[str]:
    """Of the waits."""
    return {name for name in (WAIT, ENQUEUING_WAIT) if f"@{name}(" in module.text}


def layer_by_layer(handle, x):
    for layer in range(CASE.spec.num_layers):
        x = x + handle.wait(layer, after=x)[0].sum().astype(x.dtype)
    return x, handle.cache, getattr(handle, "pool", None)


def reversed_layers(handle, x):
    return [handle.wait(layer) for layer in reversed(range(CASE.spec.num_layers))], handle.cache


def in_groups(handle, x):
    groups = [handle.wait(range(2), after=x), handle.wait([3, 2])]
    return groups, handle.cache, getattr(handle, "pool", None)


def in_each_branch(handle, x):
    def wait(handle):
        return getattr(handle, "pool", None), handle.cache

    return jax.lax.cond(x > 0, lambda handle: wait(handle), wait, handle)


def carried_by_a_loop(handle, x):
    handle = jax.lax.scan(lambda handle, _: (handle, None), handle, length=3)[0]
    return layer_by_layer(handle, x)


CONTINUED = {
    "layer by layer": layer_by_layer,
    "reversed": reversed_layers,
    "in groups": in_groups,
    "only the last": lambda handle, x: (handle.wait(LAST), handle.cache),
    "only all": lambda handle, x: (getattr(handle, "pool", None), handle.cache),
    "inner jit": lambda handle, x: jax.jit(layer_by_layer)(handle, x),
    "each branch": in_each_branch,
    "loop": carried_by_a_loop,
    "returned after its waits": lambda handle, x: (layer_by_layer(handle, x), handle),
}


# The pool of a store has a wait of its own.
STEPS = [("load", name) for name in CONTINUED]
STEPS += [("store", name) for name in CONTINUED if name not in ("reversed", "only the last")]


@pytest.mark.parametrize(("direction", "name"), STEPS)
def test_program_with_all_waits_continues_the_copy(direction, name):
    module = lowered(CONTINUED[name], direction)
    assert module.deferred == [True] and module.joined == [False]
    assert targets(module) == {ENQUEUING_WAIT}
    assert not module.violations(0)


PARTIAL = {
    "returned": lambda handle, x: handle,
    "returned after the first layer": lambda handle, x: (handle.wait(0), handle),
}


@pytest.mark.parametrize("step", PARTIAL.values(), ids=PARTIAL)
def test_copy_that_other_programs_wait_for_is_enqueued_at_its_start(step):
    module = lowered(step)
    assert module.deferred == [False]
    assert targets(module) <= {WAIT}


def test_copy_by_a_kernel_is_not_deferred():
    module = lowered(layer_by_layer, named="kernel")
    assert module.joined == [False] and module.deferred == [False]
    assert targets(module) == {WAIT}


def test_short_copy_is_enqueued_at_its_start_and_its_waits_are_captured(monkeypatch):
    monkeypatch.setattr(async_calls, "_DESCRIPTORS_AHEAD", 1024)
    module = lowered(layer_by_layer)
    assert module.deferred == [False] and targets(module) == {WAIT}


@pytest.mark.parametrize(
    ("num_bytes", "descriptors", "segments"),
    [
        (1, 1 << 30, 1),
        (1 << 30, 1, 1),
        (2 << 10, 1 << 30, 1),
        ((2 << 10) + 1, 1 << 30, 2),
        (1 << 30, 16, 2),
        (1 << 30, 17, 3),
        (1 << 30, 24, 3),
        (1 << 30, 25, None),
    ],
)
def test_segments_ahead_cover_bytes_or_descriptors(monkeypatch, num_bytes, descriptors, segments):
    """Each of 4 layers has 2 KiB in 8 descriptors."""
    monkeypatch.setattr(async_calls, "_BYTES_AHEAD", num_bytes)
    monkeypatch.setattr(async_calls, "_DESCRIPTORS_AHEAD", descriptors)
    module = lowered(layer_by_layer)
    assert module.deferred == [segments is not None]
    if segments:
        assert f"segments_ahead = {segments} : i64" in module.text


def test_traced_waits_of_a_scan_enqueue_all():
    arrays = random_arrays("separate", stacked=True)
    cache = jax.tree.map(jnp.asarray, arrays)
    spec = jaxkv.ArrayCacheSpec.from_arrays(cache, stacked=True)
    pool = jaxkv.HostPool.create(spec, num_pages=8)

    def step(pool, cache, *ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation="dma")

        def layer(carry, number):
            loading, x = carry
            return (loading, x + loading.wait(number, after=x)["k"][number].sum()), None

        carry = loading, jnp.zeros((), "bfloat16")
        (loading, x), _ = jax.lax.scan(layer, carry, jnp.arange(spec.num_layers))
        return x, loading.cache

    ids = [jaxkv.HostIds([1, 2]), jaxkv.HostIds([3, 4])]
    module = Module(jax.jit(step, donate_argnums=1).lower(pool, cache, *ids))
    assert module.deferred == [True] and targets(module) == {ENQUEUING_WAIT}


def test_ticket_whose_use_is_unknown_is_not_deferred():
    """A wait for what the program computes from a ticket would not be known either."""

    def step(handle, x):
        leaves, structure = jax.tree.flatten(handle)
        ticket = jnp.where(x > 0, leaves[0], leaves[0][::-1])
        other = jax.tree.unflatten(structure, [ticket, *leaves[1:]])
        return other.wait(0)[0].sum(), layer_by_layer(handle, x)

    assert lowered(step).deferred == [False]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1))
def test_random_programs_wait_for_all_that_is_deferred(seed):
    module = Program(CASE, "dma", seed).lowered()
    assert not module.violations(seed)


def test_negative_control_missing_wait_is_detected(monkeypatch):
    monkeypatch.setattr(buffer_lifetime._Program, "is_continued", lambda self, start: True)
    programs = ((seed, Program(CASE, "dma", seed).lowered()) for seed in range(40))
    wrong = [line for seed, module in programs for line in module.violations(seed)]
    assert any("never enqueued" in line for line in wrong)
