"""Errors of copies in traced functions: transformations, traced sizes, pools of other memory."""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util.transfer_cases import assert_rejected, make_case

IDS = np.array([1, 2], np.int32)
OPERATIONS = ["load_pages", "store_pages", "start_load", "start_store"]
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def state_of(**spec):
    case = make_case(**spec)
    return case.pool(), case.cache()


@every_operation
@pytest.mark.parametrize("inner_jit", [False, True], ids=["vmap", "vmap of jit"])
def test_vmap_is_rejected(operation, inner_jit):
    pool, cache = state_of()
    call = partial(getattr(jaxkv, operation), pool, cache)
    if inner_jit:
        call = partial(jax.jit(getattr(jaxkv, operation)), pool, cache)
    batch = np.stack([IDS, IDS])
    words = (f"{operation}: jax.vmap is not supported", "in one call")
    assert_rejected(lambda: jax.vmap(call)(batch, batch), NotImplementedError, *words)


@every_operation
@pytest.mark.parametrize("inner_jit", [False, True], ids=["grad", "grad of jit"])
def test_grad_is_rejected(operation, inner_jit):
    pool, cache = state_of(dtype="float32")
    run = getattr(jaxkv, operation)
    if inner_jit:
        run = jax.jit(run)

    def loss(cache):
        result = run(pool, cache, IDS, IDS)
        return sum(leaf.astype(float).sum() for leaf in jax.tree.leaves(result))

    words = (f"{operation}: jax.grad", "no derivative", "stop_gradient")
    assert_rejected(lambda: jax.grad(loss)(cache), NotImplementedError, *words)


@pytest.mark.parametrize("operation", ["swap_blocks", "start_swap"])
@pytest.mark.parametrize("transform", [jax.vmap, jax.grad], ids=["vmap", "grad"])
def test_transformed_swap_is_rejected(transform, operation):
    array = jnp.zeros((2, 3, 4))

    def swapped(src):
        swap = getattr(jaxkv, operation)
        return jax.tree.leaves(swap(src, jnp.zeros((3, 4)), IDS, IDS))[-1].sum()

    src = array if transform is jax.vmap else array[0]
    assert_rejected(lambda: transform(swapped)(src), NotImplementedError, f"{operation}: jax.")


def test_gradient_of_other_arguments_is_unaffected():
    pool, cache = state_of(dtype="float32")

    @jax.jit
    def loss(x, pool, cache):
        k, _ = jaxkv.load_pages(pool, cache, IDS, IDS).layers[0]
        return (x * jnp.nan_to_num(k[1]).sum() * 0 + x * x).sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.arange(3.0), pool, cache), [0.0, 2.0, 4.0])


@every_operation
@pytest.mark.parametrize("layers", [lambda n: n, lambda n: [0, n]], ids=["a layer", "in a list"])
def test_traced_layers_are_rejected(operation, layers):
    pool, cache = state_of()

    @jax.jit
    def step(pool, cache, layer):
        return getattr(jaxkv, operation)(pool, cache, IDS, IDS, layers=layers(layer))

    words = ("layers must be static", "static_argnames")
    assert_rejected(lambda: step(pool, cache, 1), TypeError, *words)


@pytest.mark.parametrize("start", [jaxkv.start_load, jaxkv.start_store, jaxkv.start_swap])
def test_traced_timeout_is_rejected(start):
    state = [jnp.zeros((3, 4))] * 2 if start is jaxkv.start_swap else state_of()
    call = partial(jax.jit(start), *state, IDS, IDS, timeout_s=5.0)
    words = "timeout_s must be a Python number", "got a traced value", "static_argnames"
    assert_rejected(call, TypeError, *words)


@every_operation
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
def test_closed_pool_is_rejected(operation, inside_jit):
    pool, cache = state_of()
    run = getattr(jaxkv, operation)
    step = jax.jit(run) if inside_jit else run
    jax.block_until_ready(step(pool, cache, IDS, IDS))
    pool.close()
    pool.close()
    error = RuntimeError if inside_jit else ValueError
    assert_rejected(lambda: step(pool, cache, IDS, IDS), error, "closed")
    assert pool.data.is_deleted()


@every_operation
def test_pool_in_device_memory_is_rejected_inside_jit(operation):
    pool, cache = state_of()
    pool = pickle.loads(pickle.dumps(pool))
    inner = jax.jit(getattr(jaxkv, operation))
    step = jax.jit(lambda pool, cache: inner(pool, cache, IDS, IDS))
    words = (f"{operation}: pool.data", "memory kind pinned_host, got device")
    assert_rejected(lambda: step(pool, cache), ValueError, *words)


@pytest.mark.parametrize("operation", ["load_pages", "store_pages"])
def test_pool_whose_type_lacks_the_memory_space_is_accepted(operation):
    """`jit` with `out_shardings` loses it, although the array is in pinned memory."""
    case = make_case()
    pool, cache = case.pool(), case.cache()
    lose = jax.jit(lambda data: jax.device_put(data, jax.memory.Space.Device) + 0)
    pinned = pool.data.sharding
    data = jax.jit(lose, out_shardings=pinned)(pool.data)
    assert data.sharding.memory_kind == "pinned_host"
    other = type(pool)(data, pool.spec, pool.layout, pool.head_groups)
    step = jax.jit(getattr(jaxkv, operation))
    result = step(other, cache, IDS, IDS)
    if operation == "load_pages":
        case.assert_holds(pool, result, **case.expected("load", IDS, IDS))


@pytest.mark.parametrize("num_pages", [2.5, 4.0, "4", None], ids=repr)
def test_sizes_that_are_not_integers_are_rejected(num_pages):
    spec = make_case().spec
    arrays = jaxkv.ArrayCacheSpec.from_arrays([jnp.zeros((2, 8))])
    for make in (
        partial(jaxkv.HostPool.create, spec),
        partial(jaxkv.HostPool.create, arrays),
        partial(jaxkv.DeviceCache.create, spec),
    ):
        words = ("num_pages must be an integer", repr(num_pages))
        assert_rejected(partial(make, num_pages=num_pages), ValueError, *words)
    assert_rejected(lambda: jaxkv.pinned_zeros((2, num_pages), np.int8), ValueError, "shape")
