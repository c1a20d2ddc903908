"""Pools that several devices of a process share: more tensor-parallel ranks than KV heads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from tests.util.layout_reference import store
from tests.util.pinned_memory import is_allocated, is_freed
from tests.util.transfer_cases import assert_rejected, make_case

pytestmark = pytest.mark.multigpu
OPERATIONS = ["store_pages", "start_store"]
HOST, DEVICE = np.array([4, 1, 3], np.int32), np.array([0, 2, 1], np.int32)


def bits(array: jax.Array, of: jax.Array | None = None) -> jax.Array:
    """The bits of a bfloat16 array, or an array of these bits: XLA on CPUs changes NaNs."""
    return array.view(jnp.uint16) if of is None else of.view(array.dtype)


class Ranks:
    """A case on a mesh whose axis "replica" has devices with the same KV heads."""

    def __init__(self, num_shards: int) -> None:
        if jax.device_count() < 2 * num_shards:
            pytest.skip(f"needs {2 * num_shards} devices, has {jax.device_count()}")
        devices = np.array(jax.devices()[: 2 * num_shards]).reshape(num_shards, 2)
        self.mesh = Mesh(devices, ("kv", "replica"))
        self.case = make_case(num_kv_heads=4)
        self.pool = jaxkv.HostPool.create(
            self.case.spec,
            num_pages=self.case.layout.num_pages,
            layout=self.case.layout.name,
            mesh=self.mesh,
            head_axis="kv",
        )
        self.cache = self.case.cache(mesh=self.mesh, head_axis="kv")
        zeros = np.zeros_like(self.case.host)
        self.stored = store(self.case.layout, zeros, self.case.device, HOST, DEVICE, None)

    def store(self, operation: str, *, donated: bool, one_rank: bool) -> jaxkv.HostPool:
        """The pool after a store by all ranks, or by replica 0 with zeros in the other caches."""

        def body(pool, cache, host_pages):
            if one_rank:
                is_first = jax.lax.axis_index("replica") == 0
                host_pages = jnp.where(is_first, host_pages, -1)
                cache = jax.tree.map(lambda a: bits(a, jnp.where(is_first, bits(a), 0)), cache)
            done = getattr(jaxkv, operation)(pool, cache, host_pages, DEVICE)
            return done.pool if operation == "start_store" else done

        specs = self.pool.partition_spec, self.cache.partition_spec, jax.P()
        # The type of `pool` varies over "replica" if one rank stores, as do its bytes if it is not
        # donated: hence without the check.
        body = jax.shard_map(
            body, mesh=self.mesh, in_specs=specs, out_specs=specs[0], check_vma=not one_rank
        )
        step = jax.jit(body, donate_argnums=0 if donated else ())
        return jax.block_until_ready(step(self.pool, self.cache, HOST))

    def loaded(self, pool: jaxkv.HostPool) -> list[np.ndarray]:
        """For each device, the pages of the pool in the first layer's keys, in the same order."""
        specs = pool.partition_spec, self.cache.partition_spec
        load = partial(jaxkv.load_pages, host_pages=HOST, device_pages=DEVICE)
        step = jax.shard_map(load, mesh=self.mesh, in_specs=specs, out_specs=specs[1])
        keys = jax.jit(step)(pool, jax.tree.map(jnp.zeros_like, self.cache)).layers[0][0]
        return [np.asarray(shard.data)[DEVICE] for shard in keys.addressable_shards]

    def wanted(self) -> list[np.ndarray]:
        shards = self.cache.layers[0][0].addressable_shards
        return [self.case.device[0][0][shard.index][DEVICE] for shard in shards]


def equal(got, want) -> list[bool]:
    return [a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True)]


@pytest.fixture(params=[1, 2], ids=["replicated", "sharded and replicated"])
def ranks(request):
    return Ranks(request.param)


def addresses(pool: jaxkv.HostPool) -> dict[jax.Device, int]:
    return {s.device: s.data.unsafe_buffer_pointer() for s in pool.data.addressable_shards}


def test_replicas_have_one_memory(ranks):
    found = addresses(ranks.pool)
    by_shard = [{found[device] for device in row} for row in ranks.mesh.devices]
    assert [len(row) for row in by_shard] == [1] * len(by_shard)
    assert len(set.union(*by_shard)) == len(by_shard)


@pytest.mark.parametrize("one_rank", [False, True], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_stores_of_one_or_all_ranks_are_loaded_by_all(ranks, operation, one_rank):
    before = addresses(ranks.pool)
    pool = ranks.store(operation, donated=True, one_rank=one_rank)
    assert addresses(pool) == before
    for shard in pool.data.addressable_shards:
        assert equal([pool.view(shard.device)], [ranks.stored[shard.index]]) == [True]
    assert equal(ranks.loaded(pool), ranks.wanted()) == [True] * ranks.mesh.size


def test_without_donation_each_rank_has_a_copy(ranks):
    before = addresses(ranks.pool)
    pool = ranks.store("store_pages", donated=False, one_rank=False)
    assert not set(addresses(pool).values()) & set(before.values())
    assert equal(ranks.loaded(pool), ranks.wanted()) == [True] * ranks.mesh.size
    assert not any(ranks.pool.view(device).astype(bool).any() for device in before)
    device = ranks.mesh.devices.flat[0]
    assert_rejected(lambda: pool.view(device), ValueError, "not donated", "donate the pool")


def test_without_donation_only_the_storing_rank_has_the_pages(ranks):
    """The documented reason to donate."""
    pool = ranks.store("store_pages", donated=False, one_rank=True)
    of_rank = dict(
        zip(
            (s.device for s in pool.data.addressable_shards),
            equal(ranks.loaded(pool), ranks.wanted()),
            strict=True,
        )
    )
    assert [of_rank[device] for device in ranks.mesh.devices[:, 0]] == [True] * len(
        ranks.mesh.devices
    )
    assert not any(of_rank[device] for device in ranks.mesh.devices[:, 1])


def test_close_frees_the_memory_of_replicas(ranks):
    found = set(addresses(ranks.pool).values())
    assert found and all(map(is_allocated, found))
    ranks.pool.close()
    assert [address for address in found if not is_freed(address)] == []


def test_arrays_that_are_replicated_have_one_memory():
    devices = np.array(jax.devices()[:2])
    sharding = jax.NamedSharding(Mesh(devices, "replica"), jax.P())
    array = jaxkv.pinned_zeros((3, 4), np.float32, sharding)
    assert len({shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}) == 1


def test_pages_of_a_page_shard():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    arrays = [jax.device_put(np.ones((4, 8, 16), np.float32), sharding)]
    spec = jaxkv.ArrayCacheSpec.from_arrays(arrays)
    words = "num_pages=5", "multiple of 2", "mesh axes data"
    assert_rejected(lambda: jaxkv.HostPool.create(spec, num_pages=5), ValueError, *words)
    pool = jaxkv.HostPool.create(spec, num_pages=6)
    assert pool.num_pages == 6
    ids = jax.device_put(np.array([2, 5], np.int32), sharding)  # of 3 pages on each device

    def load(pool, arrays, ids):
        assert pool.num_pages == 3
        return jaxkv.load_pages(pool, arrays, ids, jnp.zeros_like(ids))

    specs = pool.partition_spec, jax.P("data"), jax.P("data")
    step = jax.jit(jax.shard_map(load, mesh=mesh, in_specs=specs, out_specs=specs[1]))

    def call():
        jaxkv.check_errors(step(pool, arrays, ids))

    with pytest.raises(Exception, match=r"host_pages\[0\] = 5 is outside \[0, 3\) pages of this"):
        call()
