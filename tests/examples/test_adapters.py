"""The adapters of sglang-jax and tpu-inference, compared with NumPy on every byte."""

import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.adapters.sglang_jax import JaxkvTransfers
from examples.adapters.staged_copies import padded
from examples.adapters.tpu_inference import JaxkvOffloadWorker

# JAX cannot reuse the ticket, the plan and the staging arrays, which are donated with a handle.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

LAYERS, PAGES, HOST_PAGES = 3, 12, 8
FUSED = (4, 4, 2, 32)  # page_size, 2 * heads / 2, 2, head_dim
MESHES = {"one device": (1, 1), "heads": (1, 2), "heads and pages": (2, 2)}


def sharding_of(mesh_name: str, axis_type: AxisType) -> NamedSharding:
    shape = MESHES[mesh_name]
    if (needed := int(np.prod(shape))) > jax.device_count():
        pytest.skip(f"needs {needed} devices, found {jax.device_count()}")
    types, devices = (axis_type,) * 2, jax.devices()[:needed]
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=types, devices=devices)
    return NamedSharding(mesh, P("data", None, "tensor", None, None))


def random_caches(sharding: NamedSharding, shape=FUSED, layers=LAYERS) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    caches = [rng.random((PAGES, *shape), np.float32).astype(jax.numpy.bfloat16)]
    caches += [caches[0] + layer for layer in range(1, layers)]
    return [jax.device_put(cache, sharding) for cache in caches]


def assert_caches(got: list[jax.Array], want: list[np.ndarray]) -> None:
    for layer, (array, expected) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(np.asarray(array), expected, f"layer {layer}")


class PageBookkeeping:
    """What the mixin takes from LRUHostKVPool: allocation, epochs and the gather."""

    def __init__(self, device_pool: Any, pool_size: int) -> None:
        self._device_pool, self._pool_size = device_pool, pool_size
        self._layer_num = len(device_pool.kv_buffer)
        self._lock = threading.Lock()
        self._allocated = [False] * pool_size
        self._generation = [0] * pool_size
        self._slots: list[Any] = [None] * pool_size
        self._pending_gather: dict[int, Any] = {}
        self._pending_load: dict[int, Any] = {}

    def _jit_gather_one_layer(self, array, pages, sharding):
        return jax.jit(lambda a, i: a.at[i].get(out_sharding=sharding))(array, pages)

    def alloc(self, count: int) -> list[int]:
        free = [slot for slot, used in enumerate(self._allocated) if not used][:count]
        for slot in free:
            self._allocated[slot] = True
            self._generation[slot] += 1
        return free

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            self._allocated[slot], self._slots[slot] = False, None
            self._pending_gather.pop(slot, None)
            self._pending_load.pop(slot, None)

    def _require_allocated(self, slot: int) -> None:
        if not 0 <= slot < self._pool_size:
            raise ValueError(f"slot {slot} is out of range")
        if not self._allocated[slot]:
            raise RuntimeError(f"slot {slot} is free")

    def _require_device_pages(self, pages) -> None:
        if any(not 0 <= page < len(self._device_pool.kv_buffer[0]) for page in pages):
            raise ValueError(f"a device page of {pages} is out of range")


class SglangPool(JaxkvTransfers, PageBookkeeping):
    @property
    def caches(self) -> list[jax.Array]:
        return self._device_pool.kv_buffer

    def backup(self, device_pages: list[int], slots: list[int]) -> None:
        self.stage_backup(device_pages, slots)
        self.flush_backup(slots)


def sglang_pool(mesh_name: str = "one device") -> SglangPool:
    caches = random_caches(sharding_of(mesh_name, AxisType.Explicit))
    return SglangPool(SimpleNamespace(kv_buffer=caches), HOST_PAGES)


class TestSglang:
    @pytest.mark.parametrize("mesh_name", list(MESHES))
    @pytest.mark.parametrize("count", [1, 3, 5])
    def test_backup_and_load_back(self, mesh_name, count):
        """Also with padding up to 4 or 8 ids, and pages of both shards of the data axis."""
        pool = sglang_pool(mesh_name)
        want = [np.array(cache) for cache in pool.caches]
        sources, targets = [1, 7, 2, 10, 4][:count], [11, 0, 9, 3, 6][:count]
        slots = pool.alloc(count)[::-1]
        pool.backup(sources, slots)
        pool.stage_load(slots)
        pool.flush_load(slots, targets)
        for cache in want:
            cache[targets] = cache[sources]
        assert_caches(pool.caches, want)

    def test_gathered_pages_may_be_overwritten(self):
        pool = sglang_pool()
        want = [np.array(cache) for cache in pool.caches]
        slots = pool.alloc(2)
        pool.stage_backup([1, 2], slots)
        overwrite = jax.jit(lambda caches: [cache * 0 for cache in caches], donate_argnums=0)
        pool.caches[:] = overwrite(pool.caches)
        pool.flush_backup(slots)
        pool.stage_load(slots)
        pool.flush_load(slots, [1, 2])
        zeros = [np.zeros_like(cache) for cache in want]
        for cache, source in zip(zeros, want, strict=True):
            cache[[1, 2]] = source[[1, 2]]
        assert_caches(pool.caches, zeros)

    def test_batches_are_staged_and_flushed_in_any_grouping(self):
        pool = sglang_pool()
        want = [np.array(cache) for cache in pool.caches]
        slots = pool.alloc(5)
        pool.stage_backup([0, 1], slots[:2])  # two stores before the first flush
        pool.stage_backup([2, 3, 4], slots[2:])
        pool.flush_backup(slots)
        pool.stage_load(slots[:3])
        pool.stage_load(slots[3:])
        pool.flush_load([slots[1], slots[4]], [11, 10])
        pool.flush_load([slots[3], slots[0], slots[2]], [9, 8, 7])
        for cache in want:
            cache[[11, 10, 9, 8, 7]] = cache[[1, 4, 3, 0, 2]]
        assert_caches(pool.caches, want)

    def test_page_freed_after_its_load_started_is_not_scattered(self):
        pool = sglang_pool()
        want = [np.array(cache) for cache in pool.caches]
        slots = pool.alloc(2)
        first = slots[0]
        pool.backup([1, 2], slots)
        pool.stage_load(slots)
        staged = pool._pending_load[first]
        pool.free([first])
        with pytest.raises(RuntimeError, match=f"slot {first} is free"):
            pool.flush_load([first], [9])
        assert pool.alloc(1) == [first]
        pool._pending_load[first] = staged  # as if the flush had begun before the free
        pool.flush_load(slots, [9, 10])
        for cache in want:
            cache[10] = cache[2]
        assert_caches(pool.caches, want)

    def test_page_reallocated_during_its_gather_stays_empty(self, monkeypatch):
        pool = sglang_pool()
        (slot,) = pool.alloc(1)
        gather = pool._jit_gather_one_layer

        def reallocate(*args):
            pool.free([slot])
            assert pool.alloc(1) == [slot]
            return gather(*args)

        monkeypatch.setattr(pool, "_jit_gather_one_layer", reallocate)
        pool.stage_backup([1], [slot])
        with pytest.raises(RuntimeError, match="have not been staged"):
            pool.flush_backup([slot])
        with pytest.raises(RuntimeError, match="have no data"):
            pool.stage_load([slot])

    def test_errors(self):
        pool = sglang_pool()
        (slot,) = pool.alloc(1)
        cases: list[tuple[Any, type[Exception], str]] = [
            (lambda: pool.stage_backup([1, 2], [slot]), ValueError, "1 host pages, but 2 device"),
            (lambda: pool.stage_backup([PAGES], [slot]), ValueError, "out of range"),
            (lambda: pool.stage_backup([1], [slot + 1]), RuntimeError, "is free"),
            (lambda: pool.flush_backup([slot]), RuntimeError, "have not been staged"),
            (lambda: pool.stage_load([slot]), RuntimeError, "have no data"),
            (lambda: pool.stage_load([HOST_PAGES]), ValueError, "out of range"),
            (lambda: pool.flush_load([slot], [0]), RuntimeError, "have not been staged"),
            (lambda: pool.flush_load([slot], [-1]), ValueError, "out of range"),
            (lambda: pool.flush_load([slot], [0, 1]), ValueError, "1 host pages, but 2 device"),
        ]
        for call, error, message in cases:
            with pytest.raises(error, match=message):
                call()
        pool.stage_backup([], [])
        pool.stage_load([])

    @pytest.mark.parametrize("mesh_name", list(MESHES))
    def test_copies_run_beside_the_step(self, mesh_name):
        """The programs that start copies return without a wait."""
        copies = sglang_pool(mesh_name)._copies
        staged = jax.device_put(np.zeros((2, *FUSED), jax.numpy.bfloat16), copies.sharding)
        for program in (copies._store, copies._load):
            lowered = program.start.lower(copies._pool, [staged] * LAYERS, padded([3, 5]))
            text = lowered.as_text()
            assert "joined = false" in text and "joined = true" not in text


def offload(caches: list[jax.Array]) -> tuple[JaxkvOffloadWorker, Any, Any]:
    """A worker, its runner, and the step whose requests it sees."""
    step, runner = SimpleNamespace(requests_meta=[]), SimpleNamespace(kv_caches=caches)
    worker = JaxkvOffloadWorker(
        SimpleNamespace(_get_connector_metadata=lambda: step), num_chunks=HOST_PAGES
    )
    worker.register_runner(runner)
    return worker, runner, step


def tpu_caches() -> list[jax.Array]:
    return random_caches(sharding_of("one device", AxisType.Auto))


def save(request: str, blocks: list[int], chunks: list[int], **flags) -> SimpleNamespace:
    options = {"skip_save": False, "is_final_save": False} | flags
    spec = SimpleNamespace(src_blocks=blocks, dst_chunks=chunks, **options)
    return SimpleNamespace(req_id=request, save_spec=spec, load_spec=None)


def load(request: str, chunks: list[int], blocks: list[int], can_load=True) -> SimpleNamespace:
    spec = SimpleNamespace(src_chunks=chunks, dst_blocks=blocks, can_load=can_load)
    return SimpleNamespace(req_id=request, save_spec=None, load_spec=spec)


class TestTpuInference:
    @pytest.mark.parametrize("mesh_name", list(MESHES))
    @pytest.mark.parametrize("hybrid", [False, True])
    def test_save_and_load(self, mesh_name, hybrid):
        sharding = sharding_of(mesh_name, AxisType.Auto)
        caches = random_caches(sharding)
        if hybrid:
            caches[1:1] = random_caches(sharding, (4, 2, 2, 32), layers=2)
        want = [np.array(cache) for cache in caches]
        worker, runner, step = offload(caches)
        assert len(worker._groups) == 1 + hybrid
        step.requests_meta = [save("a", [1, 7], [5, 0]), save("b", [10], [3])]
        worker.start_save_kv()
        runner.kv_caches[:] = [cache * 0 for cache in runner.kv_caches]
        step.requests_meta = [
            load("c", [0, 3], [2, 9]),
            load("d", [5], [11]),
            load("e", [7], [0], False),
        ]
        worker.start_load_kv(None)
        expected = [np.zeros_like(cache) for cache in want]
        for cache, source in zip(expected, want, strict=True):
            cache[[2, 9, 11]] = source[[7, 10, 1]]
        assert_caches(runner.kv_caches, expected)

    def test_statistics_of_a_step(self):
        worker, _, step = offload(tpu_caches())
        step.requests_meta = [
            save("a", [1, 7], [5, 0]),
            save("b", [], [], skip_save=True, is_final_save=True),
        ]
        worker.start_save_kv()
        worker.start_save_kv()  # at most once a step
        assert worker.get_kv_connector_stats() == {"finished_save_chunks": {"a": [[5, 0], [0, 0]]}}
        assert worker.get_kv_connector_stats() is None
        assert worker.get_finished() == ({"b"}, set())
        assert worker.get_finished() == (set(), set())
        step.requests_meta = [load("c", [5], [2])]
        worker.start_load_kv(None)
        assert worker.get_kv_connector_stats() == {"finished_load_chunks": {"c": [[5, 0]]}}

    def test_errors(self):
        worker, _, step = offload(tpu_caches())
        for request, call, message in [
            (save("a", [1], [-1]), worker.start_save_kv, r"dst_chunks must be .* 8, got \[-1\]"),
            (
                save("a", [PAGES], [1]),
                worker.start_save_kv,
                r"src_blocks must be .* 12, got",
            ),
            (load("a", [1], [0]), lambda: worker.start_load_kv(None), r"\[1\] have not been saved"),
        ]:
            step.requests_meta = [request]
            worker._processed_save_for_step = False
            with pytest.raises(ValueError, match=message):
                call()

    def test_saves_run_beside_the_next_step(self):
        worker, runner, _ = offload(tpu_caches())
        ((_, copies, gather),) = worker._groups
        staged = gather(runner.kv_caches, padded([1, 2]))
        text = copies._store.start.lower(copies._pool, staged, padded([3, 5])).as_text()
        assert "joined = false" in text and "joined = true" not in text


def test_padding_is_up_to_a_power_of_two():
    assert padded([4, 2, 9]).tolist() == [4, 2, 9, -1]
    assert padded([7], 0).tolist() == [7]
    assert padded([1, 2]).dtype == np.int32
