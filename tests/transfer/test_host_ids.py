"""`jaxkv.HostIds`: only ids written by the host may be read by the host."""

import ctypes
import gc
import sys
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jaxkv
from jaxkv._src.runtime import held_arrays
from tests.util.host_ids import copied, host_implementation, made_by_a_computation
from tests.util.transfer_cases import after, assert_rejected, donating, make_case, mesh_of, runner

VALUES = np.array([3, -1, 0, 5], np.int32)
OTHERS = np.array([8, 2, -1, 1], np.int32)


def run_load(pool, cache, ids, inside_jit: bool):
    run = runner("load", inside_jit, implementation=host_implementation())
    return jax.block_until_ready(run(pool, cache, *ids))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint32", "uint64"])
def test_any_integer_dtype_is_accepted(dtype):
    ids = np.array([3, 0, 5], dtype)
    case = make_case()
    pool, cache = case.pool(), case.cache()
    out = run_load(pool, cache, [jaxkv.HostIds(ids)] * 2, inside_jit=False)
    case.assert_holds(pool, out, **case.expected("load", ids, ids))


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_length(n):
    assert len(jaxkv.HostIds(np.zeros(n, np.int32))) == n


@pytest.mark.parametrize(
    "ids, error, words",
    [
        (np.zeros(3), TypeError, ["ids", "float64"]),
        (np.zeros(3, bool), TypeError, ["ids", "bool"]),
        (np.zeros((3, 1), np.int32), ValueError, ["ids", "(3, 1)"]),
        (np.int32(3), ValueError, ["ids", "()"]),
        (np.array([2**31]), ValueError, ["ids", "2147483648", "int32"]),
        (np.array([-(2**31) - 1]), ValueError, ["ids", "-2147483649", "int32"]),
        (np.array([2**31], np.uint32), ValueError, ["ids", "2147483648", "int32"]),
        (np.array([2**63], np.uint64), ValueError, ["ids", str(2**63), "int32"]),
        ([0, 2**32 + 1], ValueError, ["ids", "4294967297", "int32"]),
    ],
    ids=["float", "bool", "rank 2", "scalar", "too large", "too small", "uint32", "uint64", "list"],
)
def test_invalid_ids_are_rejected(ids, error, words):
    assert_rejected(lambda: jaxkv.HostIds(ids), error, *words)


def test_missing_ids_are_rejected():
    assert_rejected(jaxkv.HostIds, TypeError, "ids")


def test_sharding_of_another_type_is_rejected():
    mesh: Any = mesh_of(1)
    words = "sharding must be a jax.sharding.Sharding, got Mesh", "NamedSharding("
    for of_lists, lists in ((jaxkv.HostIds, [[0]]), (jaxkv.HostIdPair, [[0], [1]])):
        call = partial(of_lists, *lists, sharding=mesh)
        assert_rejected(call, TypeError, f"{of_lists.__name__}: ", *words)


def test_device_array_is_rejected():
    assert_rejected(lambda: jaxkv.HostIds(jax.numpy.arange(3)), TypeError, "ids", "jax.Array")


@pytest.mark.parametrize("name", [False, True], ids=["device", "platform"])
def test_ids_are_on_the_default_device(name):
    assert jaxkv.HostIds([1]).data.devices() == jax.numpy.zeros(1).devices()
    device = jax.local_devices()[-1]
    with jax.default_device(device.platform if name else device):
        assert jaxkv.HostIds([1]).data.devices() == jax.numpy.zeros(1).devices()


@pytest.mark.parametrize("sharded", [False, True])
def test_creation_inside_jit_is_rejected(sharded):
    sharding = SingleDeviceSharding(jax.devices()[0]) if sharded else None
    jaxkv.HostIds([1, 2], sharding=sharding)  # the same, outside of jit
    make = jax.jit(lambda x: (jaxkv.HostIds([1, 2], sharding=sharding), x)[1])
    assert_rejected(lambda: make(1.0), RuntimeError, "HostIds", "outside of jit")


def test_ids_are_a_copy_of_the_array():
    case = make_case()
    ids = VALUES.copy()
    host_ids, device_ids = jaxkv.HostIds(ids), jaxkv.HostIds(OTHERS)
    ids[:] = 0
    pool, cache = case.pool(), case.cache()
    out = run_load(pool, cache, [host_ids, device_ids], inside_jit=False)
    case.assert_holds(pool, out, **case.expected("load", VALUES, OTHERS))


@pytest.mark.parametrize("number", [1, 2])
def test_later_ids_do_not_pass_through_device_put(number, monkeypatch):
    """Its Python code took most of the host time."""
    sharding = jax.NamedSharding(mesh_of(number), jax.P()) if number > 1 else None
    jaxkv.HostIds(VALUES, sharding=sharding)
    monkeypatch.setattr(jax, "device_put", None)
    for values in (OTHERS, VALUES):
        ids = jaxkv.HostIds(values, sharding=sharding)
        for shard in ids.data.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data)[-len(values) :], values)


@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_ids_are_reusable(direction, inside_jit):
    case = make_case()
    ids = jaxkv.HostIds(VALUES), jaxkv.HostIds(OTHERS)
    run = runner(direction, inside_jit, implementation=host_implementation())
    for _ in range(3):
        pool, cache = case.pool(), case.cache()
        out = run(pool, cache, *ids)
        want = case.expected(direction, VALUES, OTHERS)
        case.assert_holds(*after(direction, out, pool, cache), **want)


def test_ids_may_be_released_after_dispatch():
    """Only the call may keep them alive, and many generations may reuse their memory."""
    case = make_case()
    step = donating("load", implementation=host_implementation())
    pool, cache = case.pool(), case.cache()
    rng = np.random.default_rng(0)
    want = case
    for _ in range(50):
        ids = rng.integers(-1, 12, 3), rng.permutation(9)[:3]
        cache = step(pool, cache, *map(jaxkv.HostIds, ids))
        want = type(case)(case.layout, case.host, want.expected("load", *ids)["device"])
    want.assert_holds(pool, cache)


def without_a_header(ids):
    raw = np.arange(jax.tree.leaves(ids)[0].size, dtype=np.int32)
    return jax.tree.map(lambda words: jax.device_put(raw, words.sharding), ids)


@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("forge", [made_by_a_computation, without_a_header, copied])
@pytest.mark.parametrize("side", ["host_pages", "device_pages"])
def test_ids_not_written_by_the_host_are_rejected(forge, side, inside_jit):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    ids = {"host_pages": jaxkv.HostIds(VALUES), "device_pages": jaxkv.HostIds(OTHERS)}
    ids[side] = forge(original := ids[side])
    assert_rejected(
        lambda: run_load(pool, cache, ids.values(), inside_jit),
        (ValueError, RuntimeError),
        "HostIds",
        "NumPy",
    )
    if not inside_jit:
        case.assert_holds(pool, cache)
    assert len(original) == len(VALUES)


def address_of(ids) -> int:
    (words,) = jax.tree.leaves(ids)
    return words.unsafe_buffer_pointer()


def test_freed_ids_do_not_validate_other_arrays():
    """A computation's copy of sealed ids at an address where other, freed ids were admitted."""
    case = make_case()
    pool, cache = case.pool(), case.cache()
    original, others = jaxkv.HostIds(VALUES), jaxkv.HostIds(OTHERS)
    with mock.patch.object(held_arrays, "PLATFORMS", set()):  # freed at once
        freed = [jaxkv.HostIds(np.zeros_like(VALUES)) for _ in range(100)]
    addresses = {address_of(ids) for ids in freed}
    del freed
    copies = [copied(original) for _ in range(200)]
    stale = next((ids for ids in copies if address_of(ids) in addresses), None)
    if stale is None:
        pytest.skip("the allocator gave none of 200 copies the memory of 100 freed ids")
    words = (ValueError, RuntimeError), "HostIds", "stale"
    assert_rejected(lambda: run_load(pool, cache, [stale, others], inside_jit=True), *words)


def test_overwritten_ids_are_rejected():
    """Any changed word: either the call rejects it, or the word has no effect."""
    case = make_case()
    ids = jaxkv.HostIds(VALUES), jaxkv.HostIds(OTHERS)
    (words,) = jax.tree.leaves(ids[0])
    rejected = set()
    for number in range(words.size):
        word = ctypes.c_int32.from_address(address_of(ids[0]) + 4 * number)
        pool, cache = case.pool(), case.cache()
        word.value ^= 1 << (number % 31)
        try:
            out = run_load(pool, cache, ids, inside_jit=True)
        except (ValueError, RuntimeError) as error:
            assert "HostIds" in str(error)
            rejected.add(number)
        else:
            case.assert_holds(pool, out, **case.expected("load", VALUES, OTHERS))
        word.value ^= 1 << (number % 31)
    header = words.size - len(VALUES)
    assert rejected >= {0, 1, *range(header, words.size)}  # magic, length and every id
    pool, cache = case.pool(), case.cache()
    out = run_load(pool, cache, ids, inside_jit=True)
    case.assert_holds(pool, out, **case.expected("load", VALUES, OTHERS))


@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("rebuilt", [(0,), (1,), (0, 1)], ids=["source", "destination", "both"])
def test_host_ids_are_a_pytree(rebuilt, inside_jit):
    """Flattened and unflattened ids are the same ids."""
    case = make_case()
    ids = [jaxkv.HostIds(VALUES), jaxkv.HostIds(OTHERS)]
    for side in rebuilt:
        ids[side] = jax.tree.unflatten(jax.tree.structure(ids[side]), jax.tree.leaves(ids[side]))
        assert len(ids[side]) == len(VALUES)
    pool, cache = case.pool(), case.cache()
    out = run_load(pool, cache, ids, inside_jit)
    case.assert_holds(pool, out, **case.expected("load", VALUES, OTHERS))


def test_flattening_ids_runs_no_python():
    """With cold caches, each Python function on the way costs a call some microseconds."""
    ids, ran = jaxkv.HostIds([1, 2]), []

    def note(frame, event, _):
        if event == "call":
            ran.append(frame.f_code.co_name)

    before = sys.getprofile()
    gc.disable()  # it would run callbacks in Python
    sys.setprofile(note)
    try:
        jax.tree_util.default_registry.flatten([ids])
    finally:
        sys.setprofile(before)
        gc.enable()
    assert ran == []
    assert not hasattr(ids, "__dict__")  # a single object to flatten


@pytest.mark.parametrize("leaf", [None, object()])
def test_pytree_accepts_any_leaf(leaf):
    """As when `jax.tree.map` makes a tree of shardings, or of None."""
    made = jax.tree.map(lambda _: leaf, jaxkv.HostIds([1, 2]))
    assert isinstance(made, jaxkv.HostIds) and made.data is leaf and made.ids is None


def test_sharded_ids_are_rejected():
    sharding = jax.NamedSharding(mesh_of(2), jax.P("tp"))
    assert_rejected(lambda: jaxkv.HostIds([1, 2], sharding=sharding), ValueError, "sharding", "tp")


def test_ids_are_in_pinned_memory():
    assert jaxkv.HostIds([1]).data.sharding.memory_kind == "pinned_host"


def test_thousands_of_live_ids():
    many = [jaxkv.HostIds([i % 5]) for i in range(3000)]
    src, dst = jax.numpy.arange(5), jax.numpy.zeros(5, int)
    step = jax.jit(lambda *args: jaxkv.swap_blocks(*args, implementation=host_implementation()))
    for i, ids in enumerate(many):
        assert step(src, dst, ids, ids)[i % 5] == i % 5


@pytest.mark.parametrize(
    "change", [lambda words: words.astype("float32"), lambda words: words[:3]], ids=["dtype", "cut"]
)
def test_transformed_ids_are_rejected(change):
    ids, array = jax.tree.map(change, jaxkv.HostIds([1, 2])), jax.numpy.arange(5)
    call = partial(jaxkv.swap_blocks, array, array, ids, ids)
    assert_rejected(call, ValueError, "src_ids", "HostIds was replaced")


@pytest.mark.parametrize(
    "ids, error, word",
    [
        (None, TypeError, "got None"),
        ({1}, TypeError, "got {1}"),
        ("1", TypeError, "got '1'"),
        ([[1], [2, 3]], ValueError, "a list of integers"),
    ],
)
def test_ids_that_are_no_list_are_rejected(ids, error, word):
    pool, cache, one = make_case().pool(), make_case().cache(), np.zeros(1, np.int32)
    assert_rejected(lambda: jaxkv.load_pages(pool, cache, ids, one), error, "host_pages", word)
    assert_rejected(lambda: jaxkv.HostIds(ids), error, word)
