"""In-place calls on arrays that are parts of others.

XLA for GPUs can fuse a slice, a call and an update; bytes that the call does not write must stay.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime.bounds import check_bounds
from tests.util.async_cases import OVERLAPPED, finish, ids_of, start
from tests.util.layout_reference import assert_same_bytes, random_array
from tests.util.recurrent_cases import TEMPORAL, batch_of, post, random_rows, random_states
from tests.util.transfer_cases import as_ids, make_case, put

IDS = [3, -1, 0, 8, 5], [11, 2, -1, 0, 4]
# Forms of slicing a layer from a stack and storing the result.
FORMS = {
    "put back": lambda swap, stack: jax.lax.fori_loop(
        0, len(stack), lambda layer, stack: stack.at[layer].set(swap(stack[layer])), stack
    ),
    "put back at a place that is known": lambda swap, stack: stack.at[1].set(swap(stack[1])),
    "put elsewhere": lambda swap, stack: stack.at[2].set(swap(stack[0])),
    "scanned": lambda swap, stack: jax.lax.scan(lambda _, x: (None, swap(x)), None, stack)[1],
    "sliced": lambda swap, stack: swap(stack[1]),
    "put into a copy": lambda swap, stack: (stack, stack.at[1].set(swap(stack[1]))),
}


def wanted(form: str, swapped: np.ndarray, stack: np.ndarray):
    """Expected output of a form: the stack, and the same stack with every layer copied into."""
    changed = stack.copy()
    if form in ("put back", "scanned"):
        return swapped
    if form == "sliced":
        return swapped[1]
    if form == "put elsewhere":
        changed[2] = swapped[0]
        return changed
    changed[1] = swapped[1]
    return (stack, changed) if form == "put into a copy" else changed


@pytest.mark.parametrize("fuse", [None, True], ids=["by default", "fused"])
@pytest.mark.parametrize("memories", [("pinned_host", "device"), ("device", "device")])
@pytest.mark.parametrize("form", FORMS)
def test_swap_into_a_layer_of_a_stacked_array(form, memories, fuse, implementation):
    rng = np.random.default_rng(0)
    src = random_array(rng, (9, 256), "int32")
    stack = random_array(rng, (3, 12, 256), "int32")
    ids = [as_ids(side, implementation) for side in IDS]
    options = {"xla_gpu_enable_dynamic_slice_fusion": fuse} if fuse else None

    donated = () if form == "sliced" else 1

    @partial(jax.jit, donate_argnums=donated, compiler_options=options)
    def step(src, stack, *ids):
        swap = partial(jaxkv.swap_blocks, implementation=implementation)
        return FORMS[form](lambda layer: swap(src, layer, *ids), stack)

    placed = [
        put(array, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory))
        for array, memory in zip((src, stack), memories, strict=True)
    ]
    swapped = stack.copy()
    for source, destination in zip(*IDS, strict=True):
        if source >= 0 and destination >= 0:
            swapped[:, destination] = src[source]
    out = step(*placed, *ids)
    jaxkv.check_errors(out)
    jax.tree.map(partial(assert_same_bytes, name=form), out, wanted(form, swapped, stack))


@pytest.mark.parametrize("fuse", [None, True], ids=["by default", "fused"])
def test_swap_from_layers_of_a_stacked_array(fuse, implementation):
    rng = np.random.default_rng(0)
    stack = random_array(rng, (3, 9, 256), "int32")
    dst = random_array(rng, (12, 256), "int32")
    ids = [as_ids(side, implementation) for side in IDS]
    options = {"xla_gpu_enable_dynamic_slice_fusion": fuse} if fuse else None

    @partial(jax.jit, donate_argnums=1, compiler_options=options)
    def step(stack, dst, *ids):
        def layer(dst, src):
            return jaxkv.swap_blocks(src, dst, *ids, implementation=implementation), dst

        return jax.lax.scan(layer, dst, stack)

    want = [dst]
    for src in stack:
        want.append(want[-1].copy())
        for source, destination in zip(*IDS, strict=True):
            if source >= 0 and destination >= 0:
                want[-1][destination] = src[source]
    out, before = step(jnp.array(stack), jnp.array(dst), *ids)
    jaxkv.check_errors(out)
    assert_same_bytes(out, want[-1], "after all layers")
    assert_same_bytes(before, np.stack(want[:-1]), "before each layer")


@pytest.mark.parametrize("named", OVERLAPPED)
@pytest.mark.parametrize("direction", ["load", "store"])
def test_async_copy_of_layers_of_a_stacked_array(direction, named):
    case = make_case(head_dim=64, dtype="int8")
    (host_pages, device_pages), ids = ids_of(case, 5, named)
    halves = case.layout.num_kv
    stack: np.ndarray = np.array(case.device)  # [layers, K and V, pages, ...]

    @partial(jax.jit, donate_argnames=("pool", "stack") if direction == "store" else "stack")
    def step(pool, stack, *ids):
        layers = tuple(
            tuple(stack[layer, kv] for kv in range(halves)) for layer in range(len(stack))
        )
        cache = dataclasses.replace(like, layers=layers)
        started = start(direction, pool, cache, *ids, implementation=named)
        for layer in range(len(stack)):
            for kv, array in enumerate(started.wait(layer)):
                # Overwrites what was stored, so that a late read by the store is detected.
                stack = stack.at[layer, kv].set(array if direction == "load" else array + 1)
        return finish(direction, started)[0], stack

    like = case.cache()
    pool, out = step(case.pool(), jnp.array(stack), *ids)
    jaxkv.check_errors(out)
    want = case.expected(direction, host_pages, device_pages)
    if direction == "load":
        assert_same_bytes(out, np.array(want["device"]), "stack")
    else:
        assert_same_bytes(pool.data, want["host"], "pool")
        assert_same_bytes(out, stack + np.int8(1), "stack")


def test_states_in_layers_of_a_stacked_array():
    rng = np.random.default_rng(3)
    rows = random_rows(rng, 20)
    states = random_states(rng, [TEMPORAL] * 3, [(32,)] * 3, [np.int8] * 3, rows.table.size + 1)
    accepted = np.ones(20, np.int32)
    drafts = rows.drafts.astype(np.int32)
    want = [post([state], batch_of(rows), accepted, drafts, (TEMPORAL,))[0][0] for state in states]

    @partial(jax.jit, donate_argnums=0)
    def scanned(stack, batch, accepted, drafts):
        def layer(_, state):
            kinds = [TEMPORAL]
            options = {"kinds": kinds, "num_drafts": drafts}
            return None, jaxkv.recurrent.align_postprocess([state], batch, accepted, **options)[0][
                0
            ]

        return jax.lax.scan(layer, None, stack)[1]

    out = scanned(jnp.stack(states), batch_of(rows), accepted, drafts)
    assert_same_bytes(out, np.stack(want), "states")


def test_bounds_check_of_a_layer_of_a_stacked_array():
    stack = np.arange(3 * 64, dtype=np.int32).reshape(3, 64)

    def check(row):
        return check_bounds("test.step", row, rows=(jnp.int32(1), 5))

    scanned = jax.jit(lambda stack: jax.lax.scan(lambda _, x: (None, check(x)), None, stack)[1])
    for out in (scanned(stack), jax.jit(jax.vmap(check))(stack)):
        jaxkv.check_errors(out)
        np.testing.assert_array_equal(out, stack)


# --------------------------------------------------------------------------------------------------
# Without a GPU: the operands of XLA, and the error of a call that was fused nevertheless


def swap(dst, src):
    return jaxkv.swap_blocks(src, dst, *map(np.array, IDS))


def aligned(states, rows):
    accepted = np.ones(20, np.int32)
    drafts = rows.drafts.astype(np.int32)
    kinds = [TEMPORAL]
    batch = batch_of(rows)
    return jaxkv.recurrent.align_postprocess(
        [states], batch, accepted, kinds=kinds, num_drafts=drafts
    )[0]


def started(dst, src, direction):
    """A cache or pool with pages copied into it; it is the first argument."""
    _, ids = ids_of(make_case(), 5, "host")
    pool, cache = (src, dst) if direction == "load" else (dst, src)
    return finish(direction, start(direction, pool, cache, *ids))[direction == "load"]


def calls():
    """By name: a function of the written and the other operand, and both operands."""
    rng = np.random.default_rng(0)
    case, rows = make_case(), random_rows(rng, 20)
    states = random_states(rng, [TEMPORAL], [(32,)], [np.int8], rows.table.size + 1)[0]
    pool, cache = case.pool(), case.cache()
    return {
        "copy": (swap, random_array(rng, (12, 256), "int32"), jnp.zeros((9, 256), jnp.int32)),
        "align": (partial(aligned, rows=rows), states, None),
        "load": (partial(started, direction="load"), cache, pool),
        "store": (partial(started, direction="store"), pool, cache),
    }


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["copy", "align", "load", "store"])
def test_written_operands_are_between_fusion_barriers(name):
    call, written, other = calls()[name]
    others = () if other is None else (other,)
    jaxpr = jax.make_jaxpr(call)(written, *others).jaxpr
    inputs: list[object] = [*jaxpr.invars[: len(jax.tree.leaves(written))]]
    barrier = jax.make_jaxpr(jax.lax.optimization_barrier)(1).jaxpr.eqns[0].primitive
    assert inputs and jaxpr.outvars
    for equation in jaxpr.eqns:
        if equation.primitive is barrier:
            continue
        if equation.primitive.name == "jaxkv_untransformed":  # leaves nothing in the program
            pairs = zip(equation.invars, equation.outvars, strict=True)
            inputs += [new for old, new in pairs if old in inputs]
            continue
        assert not {*equation.outvars} & {*jaxpr.outvars}, equation
        assert not any(variable in inputs for variable in equation.invars), equation


@pytest.fixture
def taken_apart(monkeypatch):
    """Calls without aliasing of results and operands."""
    call = jax.ffi.ffi_call

    def without_aliases(*args, input_output_aliases=None, **options):
        return call(*args, **options)

    monkeypatch.setattr(jax.ffi, "ffi_call", without_aliases)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["copy", "align", "load", "store"])
def test_call_without_aliasing_raises(name, taken_apart):
    call, written, other = calls()[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"must share a buffer.* would be lost"):
        jax.block_until_ready(jax.jit(partial(call))(written, *([] if other is None else [other])))


@pytest.mark.cpu_only
def test_wait_without_aliasing_raises(request):
    case = make_case()
    loading = jaxkv.start_load(case.pool(), case.cache(), *ids_of(case, 5, "host")[1])
    request.getfixturevalue("taken_apart")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"must share a buffer.* would be lost"):
        jax.block_until_ready(jax.jit(lambda loading: loading.cache)(loading))


@pytest.mark.cpu_only
def test_bounds_check_without_aliasing_passes(taken_apart):
    carry = np.arange(1000, dtype=np.int32)
    out = jax.jit(lambda carry: check_bounds("test.step", carry, rows=(jnp.int32(1), 5)))(carry)
    np.testing.assert_array_equal(out, carry)
