"""`jaxkv.HostIdPair`: both id lists of a call in one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util.host_ids import copied, host_implementation, made_by_a_computation
from tests.util.transfer_cases import after, assert_rejected, make_case, mesh_of, runner

FIRST, SECOND = np.array([3, 0, 5], np.int32), np.array([1, 4, 2], np.int32)
HOST = host_implementation()


def unpacked(operation, **options):
    """A program of an operation on two arrays and a pair."""
    return jax.jit(lambda one, other, ids: operation(one, other, *ids, **options))


@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_pages_of_both_lists_are_copied(direction, inside_jit, implementation):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    run = runner(direction, inside_jit, implementation=implementation)
    out = run(pool, cache, *jaxkv.HostIdPair(FIRST, SECOND))
    want = case.expected(direction, FIRST, SECOND)
    case.assert_holds(*after(direction, out, pool, cache), **want)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8, 100, 1025])
def test_any_length(n, implementation):
    """Also those at which the second list is not aligned to 16 bytes."""
    rng = np.random.default_rng(n)
    first, second = (rng.permutation(1200)[:n].astype(np.int32) for _ in range(2))
    first[::3] = -1
    src, dst = jnp.arange(1200), jnp.zeros(1200, int)
    ids = jaxkv.HostIdPair(first, second)
    got = unpacked(jaxkv.swap_blocks, implementation=implementation)(src, dst, ids)
    want = np.zeros(1200, int)
    want[second[first >= 0]] = first[first >= 0]
    np.testing.assert_array_equal(got, want)
    assert [len(one) for one in ids] == [n, n]
    for one, values in zip(ids, (first, second), strict=True):
        np.testing.assert_array_equal(one.ids, values)


def test_a_program_has_one_argument_for_both():
    src, dst = jnp.arange(8), jnp.zeros(8, int)
    ids = jaxkv.HostIdPair(FIRST, SECOND)
    program = unpacked(jaxkv.swap_blocks, implementation="xla")
    assert len(program.trace(src, dst, ids).jaxpr.jaxpr.invars) == 3
    assert len(ids.data) == len(jaxkv.HostIds(np.concatenate([FIRST, SECOND])).data)
    np.testing.assert_array_equal(program(src, dst, ids)[SECOND], FIRST)


def test_lists_of_different_pairs_can_be_mixed():
    src, dst = jnp.arange(8), jnp.zeros(8, int)
    run = jax.jit(lambda *args: jaxkv.swap_blocks(*args, implementation=HOST))
    one, other = jaxkv.HostIdPair(FIRST, [7, 7, 7]), jaxkv.HostIdPair([6, 6, 6], SECOND)
    lists = [*one], [*other]
    np.testing.assert_array_equal(run(src, dst, lists[0][0], lists[1][1])[SECOND], FIRST)
    np.testing.assert_array_equal(run(src, dst, lists[0][0], jaxkv.HostIds(SECOND))[SECOND], FIRST)
    np.testing.assert_array_equal(run(src, dst, jaxkv.HostIds(FIRST), lists[1][1])[SECOND], FIRST)
    swapped = jaxkv.HostIdPair(SECOND, FIRST)
    np.testing.assert_array_equal(run(src, dst, *reversed([*swapped]))[SECOND], FIRST)


def test_an_asynchronous_copy_of_a_pair():
    case = make_case()
    pool, cache = case.pool(), case.cache()

    @jax.jit
    def step(pool, cache, ids):
        loading = jaxkv.start_load(pool, cache, *ids)
        for layer in range(len(cache.layers)):
            loading.wait(layer)
        return loading.cache

    out = step(pool, cache, jaxkv.HostIdPair(FIRST, SECOND))
    case.assert_holds(pool, out, **case.expected("load", FIRST, SECOND))


def test_groups_of_pairs():
    src = {"a": jnp.arange(8), "b": jnp.arange(8.0)}
    dst = jax.tree.map(jnp.zeros_like, src)
    ids = {"a": jaxkv.HostIdPair(FIRST, SECOND), "b": jaxkv.HostIdPair(SECOND, FIRST)}

    @jax.jit
    def run(src, dst, ids):
        lists = {group: [*pair] for group, pair in ids.items()}
        first, second = ({group: pair[i] for group, pair in lists.items()} for i in range(2))
        return jaxkv.swap_blocks(src, dst, first, second, implementation=HOST)

    got = run(src, dst, ids)
    np.testing.assert_array_equal(got["a"][SECOND], FIRST)
    np.testing.assert_array_equal(got["b"][FIRST], SECOND)


@pytest.mark.multigpu
def test_pair_of_several_devices():
    mesh = mesh_of(2)
    replicated = jax.NamedSharding(mesh, jax.P())
    src, dst = (jax.device_put(x, replicated) for x in (jnp.arange(8), jnp.zeros(8, int)))
    ids = jaxkv.HostIdPair(FIRST, SECOND, sharding=replicated)
    run = jax.shard_map(
        lambda src, dst, ids: jaxkv.swap_blocks(src, dst, *ids, implementation=HOST),
        mesh=mesh, in_specs=(jax.P(), jax.P(), jax.P()), out_specs=jax.P(), check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(run)(src, dst, ids)[SECOND], FIRST)


@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("forge", [made_by_a_computation, copied])
def test_pairs_not_written_by_the_host_are_rejected(forge, inside_jit):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    run = runner("load", inside_jit, implementation=HOST)
    ids = forge(jaxkv.HostIdPair(FIRST, SECOND))
    call = lambda: jax.block_until_ready(run(pool, cache, *ids))  # noqa: E731
    assert_rejected(call, (ValueError, RuntimeError), "HostIds", "NumPy")


@pytest.mark.parametrize(
    ("lists", "error", "words"),
    [
        ((), TypeError, ["first and second are required"]),
        (([1],), TypeError, ["first and second are required"]),
        (([1], [1, 2]), ValueError, ["same length", "1 and 2"]),
        (([1.0], [1]), TypeError, ["first", "float64"]),
        (([1], [2**31]), ValueError, ["second", "2147483648", "int32"]),
        (([1], jnp.zeros(1, int)), TypeError, ["second", "jax.Array"]),
    ],
)
def test_invalid_lists_are_rejected(lists, error, words):
    assert_rejected(lambda: jaxkv.HostIdPair(*lists), error, *words)


def test_a_pair_in_place_of_a_list_is_rejected():
    src, dst, ids = jnp.arange(8), jnp.zeros(8, int), jaxkv.HostIdPair(FIRST, SECOND)
    call = lambda: jaxkv.swap_blocks(src, dst, ids, SECOND)  # type: ignore[arg-type]  # noqa: E731
    assert_rejected(call, TypeError, "src_ids", "HostIdPair", "unpack")


def test_invalid_entries_of_a_pair_are_errors():
    src, dst = jnp.arange(8), jnp.zeros(8, int)
    for first, second, words in (
        ([8, 1, 2], SECOND, ("src_ids[0]", "8")),
        (FIRST, [1, 8, 2], ("dst_ids[1]", "8")),
        (FIRST, [1, 2, 1], ("dst_ids", "duplicate", "1")),
    ):
        ids = jaxkv.HostIdPair(first, second)
        assert_rejected(lambda: jaxkv.swap_blocks(src, dst, *ids), jaxkv.PageIndexError, *words)  # noqa: B023


@pytest.mark.parametrize("leaf", [None, object()])
def test_pytree_accepts_any_leaf(leaf):
    made = jax.tree.map(lambda _: leaf, jaxkv.HostIdPair([1], [2]))
    assert isinstance(made, jaxkv.HostIdPair) and made.data is leaf and made.ids is None
