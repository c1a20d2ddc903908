"""Destinations of `swap_blocks` in host memory that are typed as in device memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util.transfer_cases import assert_rejected, make_case, mesh_of

IDS = np.array([1, 2], np.int32)
WORDS = "swap_blocks", "dst", "8x16", "pinned_host", "device memory", "pinned_zeros"


def mistyped() -> jax.Array:
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    array = jax.jit(lambda: jnp.ones((8, 16), jnp.float32), out_shardings=pinned)()
    assert array.sharding.memory_kind == "pinned_host"
    assert jax.typeof(array).memory_space == jax.memory.Space.Device
    return array


def on_device() -> jax.Array:
    return jnp.full((4, 16), 3.0)


@pytest.mark.parametrize("donated", [True, False])
def test_a_mistyped_destination_is_refused_while_lowering(donated):
    """Donated, it aborts the process; otherwise the result is in device memory."""
    swap = jax.jit(jaxkv.swap_blocks, donate_argnames="dst" if donated else None)
    assert_rejected(lambda: swap(on_device(), mistyped(), IDS, IDS), ValueError, *WORDS)


def test_a_mistyped_destination_is_refused_outside_of_jit():
    call = partial(jaxkv.swap_blocks, on_device(), mistyped(), IDS, IDS)
    assert_rejected(call, ValueError, *WORDS)


def test_a_mistyped_destination_is_refused_behind_calls_and_in_a_tree():
    @jax.jit
    def inner(src, dst):
        return jaxkv.swap_blocks(src, dst, IDS, IDS)

    swap = jax.jit(lambda src, dst: inner({"a": src, "b": src}, dst))
    right = jaxkv.pinned_zeros((8, 16), np.float32)
    call = partial(swap, on_device(), {"a": right, "b": mistyped()})
    assert_rejected(call, ValueError, *WORDS)


def test_an_array_on_a_mesh_is_not_refused():
    mesh = mesh_of(1)
    pinned = jax.NamedSharding(mesh, jax.P(), memory_kind="pinned_host")
    swap = jax.shard_map(
        lambda src, dst: jaxkv.swap_blocks(src, dst, IDS, IDS),
        mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
    )  # fmt: skip
    src = jax.device_put(on_device(), jax.NamedSharding(mesh, jax.P()))
    for dst in (
        jaxkv.pinned_zeros((8, 16), np.float32, pinned),
        jax.jit(lambda: jnp.ones((8, 16), jnp.float32), out_shardings=pinned)(),
    ):
        out = jax.jit(swap, donate_argnums=1)(src, dst)
        assert out.sharding.memory_kind == "pinned_host"


def test_a_mistyped_source_is_read():
    swap = jax.jit(jaxkv.swap_blocks, donate_argnames="dst")
    out = swap(mistyped(), on_device(), IDS, IDS)
    jaxkv.check_errors(out)
    assert np.asarray(out)[:, 0].tolist() == [3, 1, 1, 3]


def test_the_checked_program_has_no_mark_left():
    swap = jax.jit(jaxkv.swap_blocks, donate_argnames="dst")
    text = swap.lower(on_device(), jnp.ones((8, 16)), IDS, IDS).as_text()
    assert "jaxkv_typed_on_device" not in text


def pinned(rows: int) -> jax.Array:
    return jaxkv.pinned_zeros((rows, 16), np.float32)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("version", "backend", "refused"),
    [((0, 10, 2), "gpu", True), ((0, 11, 2), "gpu", False), ((0, 10, 2), "cpu", False)],
)
def test_several_results_in_host_memory_are_refused_where_xla_aborts(
    monkeypatch, version, backend, refused
):
    source, target = [on_device(), on_device()], [pinned(4), pinned(4)]
    swap = partial(jaxkv.swap_blocks, implementation="host")

    def traced(*arrays):
        monkeypatch.setattr(jax, "__version_info__", version)
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        return jax.make_jaxpr(swap)(*arrays, IDS, IDS)

    traced(source[0], target[0])  # one is fine
    if refused:
        words = "swap_blocks", "jax", "2 results in host memory", "0.11"
        assert_rejected(lambda: traced(source, target), NotImplementedError, *words)
    else:
        traced(source, target)


def test_swaps_into_host_memory_in_a_shard_map_outside_jit_are_refused():
    """JAX would move the result to device memory."""
    mesh = mesh_of(1)
    replicated = jax.NamedSharding(mesh, jax.P())
    src = jax.device_put(on_device(), replicated)
    on_host = jaxkv.pinned_zeros((8, 16), np.float32, replicated)
    swap = jax.shard_map(
        lambda src, dst: jaxkv.swap_blocks(src, dst, IDS, IDS),
        mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
    )  # fmt: skip
    words = "swap_blocks", "float32[8, 16]", "pinned_host", "shard_map outside jit", "jax.jit"
    assert_rejected(lambda: swap(src, on_host), ValueError, *words)
    assert jax.jit(swap)(src, on_host).sharding.memory_kind == "pinned_host"
    assert np.asarray(swap(on_host, src))[:, 0].tolist() == [3, 0, 0, 3]


@pytest.mark.parametrize("operation", ["store_pages", "start_store"])
def test_stores_in_a_shard_map_outside_jit_are_refused(operation):
    case, mesh = make_case(), mesh_of(1)
    pool, cache = case.pool(mesh=mesh, head_axis="tp"), case.cache(mesh=mesh, head_axis="tp")
    specs = pool.partition_spec, cache.partition_spec

    def body(pool, cache):
        done = getattr(jaxkv, operation)(pool, cache, IDS, IDS)
        return done.pool if operation == "start_store" else done

    store = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0])
    words = operation, "pinned_host", "shard_map outside jit", "jax.jit"
    assert_rejected(lambda: store(pool, cache), ValueError, *words)
    assert jax.jit(store)(pool, cache).data.sharding.memory_kind == "pinned_host"
