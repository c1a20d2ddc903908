"""Page copies inside jit: in place under donation, under shard_map, in loops and chains."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxkv
from tests.util.layout_reference import KIND_LAYOUTS, LAYOUTS, assert_same_bytes
from tests.util.transfer_cases import (
    DESTINATION,
    DIRECTIONS,
    after,
    as_ids,
    copied_shapes,
    copy,
    distinct_ids,
    donating,
    make_case,
    mesh_of,
    pointers,
    runner,
)


def device_ids(case, count, implementation=None, seed=0):
    """NumPy (host, device) ids, and the same in the form the implementation takes."""
    ids = distinct_ids(case, count, seed)
    return ids, [as_ids(side, implementation) for side in ids]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind, layout", KIND_LAYOUTS)
def test_donation_writes_in_place(kind, layout, direction, implementation):
    case = make_case(layout, kind=kind)
    ids, args = device_ids(case, 5, implementation)
    state = {"pool": case.pool(), "cache": case.cache()}
    written = state[DESTINATION[direction]]
    before = pointers(written)
    out = donating(direction, implementation=implementation)(*state.values(), *args)
    jaxkv.check_errors()
    assert pointers(out) == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(written))
    memory = "pinned_host" if direction == "store" else "device"
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(out)} == {memory}
    pool, cache = after(direction, out, *state.values())
    case.assert_holds(pool, cache, **case.expected(direction, *ids))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind, layout", KIND_LAYOUTS)
def test_program_copies_the_destination_only_without_donation(kind, layout, direction):
    """Without donation the copy must appear: the check would otherwise prove nothing."""
    case = make_case(layout, kind=kind)
    _, ids = device_ids(case, 5)
    args = case.pool(), case.cache(), *ids
    destination = {leaf.shape for leaf in jax.tree.leaves(args[direction == "load"])}
    assert not destination & copied_shapes(donating(direction), *args)
    assert destination <= copied_shapes(jax.jit(partial(copy, direction)), *args)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_input_survives_without_donation(direction, implementation):
    case = make_case("page_head")
    ids, args = device_ids(case, 5, implementation)
    pool, cache = case.pool(), case.cache()
    out = jax.jit(partial(copy, direction, implementation=implementation))(pool, cache, *args)
    case.assert_holds(*after(direction, out, pool, cache), **case.expected(direction, *ids))
    case.assert_holds(pool, cache)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ids_of_equal_length_do_not_retrace(direction, implementation):
    case = make_case()
    traced = []

    @partial(jax.jit, donate_argnames=(DESTINATION[direction],))
    def step(pool, cache, *ids):
        traced.append(ids)
        return copy(direction, pool, cache, *ids, implementation=implementation)

    for seed in range(3):
        ids, args = device_ids(case, 5, implementation, seed)
        pool, cache = case.pool(), case.cache()
        out = step(pool, cache, *args)
        case.assert_holds(*after(direction, out, pool, cache), **case.expected(direction, *ids))
    assert len(traced) == 1


def test_step_with_load_compute_and_store(implementation):
    """Each op must see the previous writes: load, add to the cache, store, load again."""
    case = make_case("page_first_direct", dtype="int8")
    options = {"implementation": implementation}
    (loaded_host, loaded), (stored_host, stored), (_, last) = (
        distinct_ids(case, 4, seed) for seed in range(3)
    )
    numpy_ids = loaded_host, loaded, stored_host, stored, last
    ids = [as_ids(side, implementation) for side in numpy_ids]

    @partial(jax.jit, donate_argnames=("pool", "cache"))
    def step(pool, cache, loaded_host, loaded, stored_host, stored, last):
        cache = jaxkv.load_pages(pool, cache, loaded_host, loaded, **options)
        cache = jax.tree.map(lambda buffer: buffer + np.int8(1), cache)
        pool = jaxkv.store_pages(pool, cache, stored_host, stored, **options)
        return pool, jaxkv.load_pages(pool, cache, stored_host, last, **options)

    pool, cache = step(case.pool(), case.cache(), *ids)

    device = case.expected("load", loaded_host, loaded)["device"]
    want = type(case)(
        case.layout, case.host, [tuple(buffer + np.int8(1) for buffer in b) for b in device]
    )
    want = type(case)(case.layout, want.expected("store", stored_host, stored)["host"], want.device)
    case.assert_holds(pool, cache, host=want.host, **want.expected("load", stored_host, last))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_scan_over_batches_of_ids(direction):
    """Three batches in one `lax.scan` that carries the written arrays."""
    case = make_case("page_first", host_pages=16, device_pages=16)
    ids = [side.reshape(3, 4) for side in distinct_ids(case, 12)]

    @partial(jax.jit, donate_argnames=(DESTINATION[direction],))
    def scan(pool, cache, host_ids, device_ids):
        def body(carry, batch):
            return copy(direction, *after(direction, carry, pool, cache), *batch), None

        first = cache if direction == "load" else pool
        return jax.lax.scan(body, first, (host_ids, device_ids))[0]

    pool, cache = case.pool(), case.cache()
    out = scan(pool, cache, *ids)
    jaxkv.check_errors()
    want = case.expected(direction, *(side.reshape(-1) for side in ids))
    case.assert_holds(*after(direction, out, pool, cache), **want)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_vmap_over_ids_is_rejected(direction):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    ids = [np.zeros((2, 3), np.int32)] * 2
    with pytest.raises(Exception, match="vmap"):
        jax.vmap(lambda host, device: copy(direction, pool, cache, host, device))(*ids)
    case.assert_holds(pool, cache)


SHARDED = [(layout, 4 if layout == "page_unified" else 1) for layout in LAYOUTS["mha"]]


@pytest.mark.multigpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout, head_groups", SHARDED)
@pytest.mark.parametrize("devices", [2, 4])
def test_shard_map_copies_the_heads_of_each_device(
    devices, layout, head_groups, direction, named_implementation
):
    check_shard_map(devices, layout, head_groups, direction, named_implementation)


@pytest.mark.multigpu
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_shard_map_with_host_ids_per_device(direction):
    check_shard_map(2, "page_first_direct", 1, direction, None, ids_for="dma")


def check_shard_map(devices, layout, head_groups, direction, implementation, ids_for=None):
    """Copies with the heads split over a mesh, in place on each device."""
    mesh = mesh_of(devices)
    case = make_case(layout, num_kv_heads=4, head_groups=head_groups)
    ids = distinct_ids(case, 5)
    everywhere = NamedSharding(mesh, PartitionSpec())
    args = [as_ids(side, ids_for or implementation, everywhere) for side in ids]
    state = {name: getattr(case, name)(mesh=mesh, head_axis="tp") for name in ("pool", "cache")}
    specs = {name: jax.tree.leaves(tree)[0].sharding.spec for name, tree in state.items()}
    destination = DESTINATION[direction]

    @partial(jax.jit, donate_argnames=(destination,))
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs["pool"], specs["cache"], PartitionSpec(), PartitionSpec()),
        out_specs=specs[destination],
    )
    def step(pool, cache, host_ids, device_ids):
        return copy(direction, pool, cache, host_ids, device_ids, implementation=implementation)

    before = pointers(state[destination])
    out = step(*state.values(), *args)
    jaxkv.check_errors()
    assert pointers(out) == before and len(set(before)) == len(before)
    pool, cache = after(direction, out, *state.values())
    case.assert_holds(pool, cache, **case.expected(direction, *ids))


@pytest.mark.multigpu
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("layout, head_groups", SHARDED)
def test_sharded_pool_keeps_heads_on_their_device(devices, layout, head_groups):
    """Device i of n has heads `[i*H/n, (i+1)*H/n)` of the pool and of the cache alike."""
    mesh = mesh_of(devices)
    case = make_case(layout, num_kv_heads=4, head_groups=head_groups)
    pool, cache = (getattr(case, name)(mesh=mesh, head_axis="tp") for name in ("pool", "cache"))
    assert pool.data.sharding.memory_kind == "pinned_host"
    per_device = 4 // devices
    for number, device in enumerate(mesh.devices):
        (on_host,) = [s.data for s in pool.data.addressable_shards if s.device == device]
        assert on_host.size * devices == case.host.size
        (shard,) = [s.data for s in cache.layers[1][1].addressable_shards if s.device == device]
        heads = slice(number * per_device, (number + 1) * per_device)
        assert_same_bytes(shard, case.device[1][1][:, :, heads], f"shard of device {number}")


def varying_step(mesh, operation, out_specs):
    """A step on a replicated pool and cache with different ids on each device."""

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("tp"), PartitionSpec("tp")),
        out_specs=out_specs,
    )
    def step(pool, cache, host_ids, device_ids):
        result = getattr(jaxkv, operation)(pool, cache, host_ids, device_ids)
        if operation == "start_load":
            return result.cache.layers
        if operation == "start_store":
            return result.pool.data
        return result.layers if operation == "load_pages" else result.data

    return step


@pytest.mark.multigpu
@pytest.mark.parametrize("operation", ["load_pages", "store_pages", "start_load", "start_store"])
def test_state_written_with_varying_ids_is_not_replicated(operation):
    mesh, case = mesh_of(2), make_case()
    pool, cache = case.pool(mesh=mesh), case.cache(mesh=mesh)
    split = NamedSharding(mesh, PartitionSpec("tp"))
    ids = [jax.device_put(side.astype(np.int32), split) for side in distinct_ids(case, 4)]
    with pytest.raises(ValueError, match="replicat"):
        varying_step(mesh, operation, PartitionSpec())(pool, cache, *ids)
    out = varying_step(mesh, operation, PartitionSpec("tp"))(pool, cache, *ids)
    jaxkv.check_errors(out)
    direction = "load" if "load" in operation else "store"
    for number, device in enumerate(mesh.devices):
        mine = [np.asarray(side)[2 * number : 2 * number + 2] for side in ids]
        want = case.expected(direction, *mine)
        if direction == "store":
            got, wanted = [out], [want["host"]]
        else:
            got = jax.tree.leaves(out)
            wanted = [buffer for buffers in want["device"] for buffer in buffers]
        for array, buffer in zip(got, wanted, strict=True):
            (shard,) = [s.data for s in array.addressable_shards if s.device == device]
            assert_same_bytes(shard, buffer, f"{operation} on device {number}")


@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_mesh_axis_of_one_device_is_unsharded(direction, axis_type, inside_jit):
    mesh = mesh_of(1, axis_type)
    case = make_case()
    ids = distinct_ids(case, 5)
    pool, cache = (getattr(case, name)(mesh=mesh, head_axis="tp") for name in ("pool", "cache"))
    out = runner(direction, inside_jit)(pool, cache, *(side.astype(np.int32) for side in ids))
    case.assert_holds(*after(direction, out, pool, cache), **case.expected(direction, *ids))
