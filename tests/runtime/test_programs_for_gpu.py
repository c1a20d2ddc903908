"""Programs as XLA compiles them for an H200, on a machine without a GPU: what it copies, what is in
place, and which copies run beside the program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import sparse
from jaxkv._src.transfer import async_calls, dispatch
from tests.util import gpu_compiler
from tests.util.block_trees import place, random_tree
from tests.util.gpu_compiler import calls, compiled, copies, schedule
from tests.util.ranks import AXIS, memory_of
from tests.util.recurrent_cases import (
    TEMPORAL,
    batch_of,
    random_accepted,
    random_rows,
    random_states,
)
from tests.util.sparse_cases import Pair
from tests.util.sparse_cases import random_rows as random_bytes
from tests.util.transfer_cases import as_ids, distinct_ids, make_case

pytestmark = pytest.mark.cpu_only

ENGINES = ("kernel", "dma")
ON_HOST = "S(5)"  # the memory space of pinned host memory
# Of a call with several results of which one is in host memory, in XLA's host_offload_utils.cc.
aborts_on_jax_0_10 = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11), reason="the compiler of jax 0.10 aborts"
)


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch):
    gpu_compiler.require()
    monkeypatch.setattr(dispatch, "_machine", lambda: gpu_compiler.H200)


@functools.cache
def case():
    return make_case()


def arguments(engine):
    ids = [as_ids(side, engine) for side in distinct_ids(case(), 4)]
    return case().pool(), case().cache(), *ids


def assert_in_place(text: str, *trees) -> None:
    """No array of the trees is copied, and each is the output that aliases a donated input."""
    shapes = {leaf.shape for tree in trees for leaf in jax.tree.leaves(tree)}
    assert not copies(text) & shapes
    header = text[: text.index("\n")]
    aliased = header.split("input_output_alias={")[1].split("entry_computation_layout")[0]
    count = sum(len(jax.tree.leaves(tree)) for tree in trees)
    assert len(re.findall(r"\{[\d, ]*\}: \(", aliased)) >= count


def joined(text: str) -> list[bool]:
    """Whether each start ends before the program continues."""
    return ["joined = true" in line for line in calls(text) if "jaxkv_start_copy" in line]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direction", ["load", "store"])
def test_copies_of_pages_are_in_place(direction, engine):
    operation = getattr(jaxkv, f"{direction}_pages")
    written = {"load": "cache", "store": "pool"}[direction]
    step = functools.partial(operation, implementation=engine)
    pool, cache, *ids = arguments(engine)
    text = compiled(jax.jit(step, donate_argnames=written), pool, cache, *ids)
    assert_in_place(text, {"load": cache, "store": pool}[direction])
    assert not copies(text) & {pool.data.shape}
    assert ON_HOST in text.partition("->")[0]
    assert all("output_to_operand_aliasing" in line for line in calls(text))
    without = compiled(jax.jit(step), pool, cache, *ids)
    shapes = {leaf.shape for leaf in jax.tree.leaves({"load": cache, "store": pool}[direction])}
    assert copies(without) >= shapes  # as nothing is donated


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pair_of_host_ids_is_not_copied(engine):
    """It is two operands of the call, in pinned memory, where the host reads the caller's array."""
    pool, cache, *_ = arguments(engine)
    ids = jaxkv.HostIdPair(*distinct_ids(case(), 4))

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(pool, cache, ids):
        return jaxkv.load_pages(pool, cache, *ids, implementation=engine)

    text = compiled(step, pool, cache, ids)
    assert not copies(text) & {ids.data.shape}
    (call,) = [line for line in calls(text) if "jaxkv_copy_blocks" in line]
    operands = call.split("custom-call(")[1].split(", ")
    assert operands[0] == operands[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_started_loads_run_beside_the_program(engine):
    def step(h, cache, pool, *ids):
        load = jaxkv.start_load(pool, cache, *ids, implementation=engine)
        for layer in range(case().spec.num_layers):
            h = h @ h
            k, _ = load.wait(layer, after=h)
            h = h + k[0, 0, 0, 0].astype(h.dtype)
        return h, load.cache

    pool, cache, *ids = arguments(engine)
    h = jnp.ones((256, 256), jnp.float32)
    text = compiled(jax.jit(step, donate_argnums=1), h, cache, pool, *ids)
    assert_in_place(text, cache)
    assert joined(text) == [False]
    order = [name for name in schedule(text) if name.startswith(("jaxkv", "__cublas", "fusion"))]
    start = next(i for i, name in enumerate(order) if name.startswith("jaxkv_start_copy"))
    waits = [i for i, name in enumerate(order) if name == "jaxkv_wait_copy"]
    assert len(waits) >= case().spec.num_layers
    # The product of the first layer is enqueued between the start and the first wait.
    assert any(name.startswith(("__cublas", "fusion")) for name in order[start + 1 : waits[0]])


def test_waits_that_enqueue_their_copy_follow_its_start(monkeypatch):
    """In the order of the program: XLA neither removes nor moves the last one."""
    monkeypatch.setattr(async_calls, "_DESCRIPTORS_AHEAD", 1)

    def step(h, cache, pool, *ids):
        load = jaxkv.start_load(pool, cache, *ids, implementation="dma")
        for layer in range(case().spec.num_layers):
            h = h @ h
            k, _ = load.wait(layer, after=h)
            h = h + k[0, 0, 0, 0].astype(h.dtype)
        return h, load.cache

    pool, cache, *ids = arguments("dma")
    h = jnp.ones((256, 256), jnp.float32)
    text = compiled(jax.jit(step, donate_argnums=1), h, cache, pool, *ids)
    assert_in_place(text, cache)
    assert ["deferred = true" in line for line in calls(text) if "start_copy" in line] == [True]
    order = [name for name in schedule(text) if name.startswith("jaxkv")]
    assert order == ["jaxkv_start_copy_dma", *["jaxkv_wait_copy_dma"] * case().spec.num_layers]
    waits = [line for line in calls(text) if "wait_copy" in line]
    segments = [int(re.findall(r"segment = (\d+) : i64", line)[0]) for line in waits]
    assert segments == [*range(case().spec.num_layers)]


@pytest.mark.parametrize("engine", ENGINES)
def test_started_load_of_a_temporary_is_joined(engine):
    """XLA may free the buffer of an array that the program makes itself."""

    def step(cache, pool, *ids):
        made = jax.tree.map(lambda array: array + 1, cache)
        load = jaxkv.start_load(pool, made, *ids, implementation=engine)
        return load.wait(0)[0].sum()

    pool, cache, *ids = arguments(engine)
    assert joined(compiled(jax.jit(step), cache, pool, *ids)) == [True]


@pytest.mark.parametrize("direction", ["load", pytest.param("store", marks=aborts_on_jax_0_10)])
@pytest.mark.parametrize("engine", ENGINES)
def test_arrays_in_flight_are_not_copied_if_results_are_in_another_order(direction, engine):
    """JAX would give each of two caches the buffers of the other, and XLA copy both."""
    begin = getattr(jaxkv, f"start_{direction}")

    def step(pool, target, draft, *ids):
        started = begin(pool, target, *ids, implementation=engine)
        return jax.tree.map(lambda layer: layer.at[1].set(0), draft), started

    pool, target, *ids = arguments(engine)
    donated = (1, 2) if direction == "load" else (0, 1, 2)
    draft = case().cache()
    text = compiled(jax.jit(step, donate_argnums=donated), pool, target, draft, *ids)
    assert_in_place(text, target, draft)
    assert joined(text) == [False]


@pytest.mark.parametrize("direction", ["load", pytest.param("store", marks=aborts_on_jax_0_10)])
@pytest.mark.parametrize("engine", ENGINES)
def test_plan_of_the_next_copy_is_not_copied(direction, engine):
    """JAX would give it the buffer of the plan that the program waits for."""
    begin = getattr(jaxkv, f"start_{direction}")

    def step(started, pool, *ids):
        stored, cache = (None, started.cache) if pool else (started.pool, started.cache)
        return begin(pool or stored, cache, *ids, implementation=engine)

    pool, cache, *ids = arguments(engine)
    started = jax.eval_shape(functools.partial(begin, implementation=engine), pool, cache, *ids)
    if direction == "store":
        started._pool, pool = pool, None  # with its memory kind
    text = compiled(jax.jit(step, donate_argnums=0), started, pool, *ids)
    assert_in_place(text, started._cache, started._pool)
    assert started._plan is None or not copies(text) & {started._plan.shape}
    assert joined(text) == [False]


@pytest.mark.parametrize("engine", ENGINES)
@aborts_on_jax_0_10
def test_started_stores_write_the_pool_in_place(engine):
    def step(pool, cache, *ids):
        storing = jaxkv.start_store(pool, cache, *ids, implementation=engine)
        for layer in range(case().spec.num_layers):
            storing.wait(layer)
        return storing.pool, storing.cache

    pool, cache, *ids = arguments(engine)
    text = compiled(jax.jit(step, donate_argnums=(0, 1)), pool, cache, *ids)
    assert_in_place(text, pool, cache)
    assert joined(text) == [False]


@pytest.mark.parametrize(
    "memories",
    [
        pytest.param(("device", "pinned_host"), marks=aborts_on_jax_0_10),
        ("pinned_host", "device"),
    ],
)
def test_swaps_are_in_place(memories):
    src, dst = place(random_tree(9), memories[0]), place(random_tree(12, seed=1), memories[1])
    ids = np.array([3, 0], np.int32), np.array([1, 2], np.int32)
    swap = functools.partial(jaxkv.swap_blocks, implementation="kernel")
    text = compiled(jax.jit(swap, donate_argnums=1), src, dst, *ids)
    assert_in_place(text, dst)
    assert not copies(text) & {leaf.shape for leaf in jax.tree.leaves(src)}


def test_sparse_rows_are_in_place():
    pair = Pair(layers=1, layer=0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, pool, rows, positions, ids, lengths, table):
        state, pool = sparse.append(state, pool, rows, positions, layer=0, block_table=table)
        found, state = sparse.fetch(state, pool, ids, layer=0, lengths=lengths, block_table=table)
        return found, state, pool

    positions, ids = np.zeros((3, 1), np.int32), np.ones((3, 4), np.int32)
    rows, lengths = random_bytes(pair.rng, 3, 1, 32), np.full(3, 24, np.int32)
    args = pair.state, pair.pool, rows, positions, ids, lengths, pair.table
    text = compiled(step, *args)
    assert_in_place(text, pair.state, pair.pool)
    assert len([line for line in calls(text) if "jaxkv_sparse" in line]) >= 2


def test_recurrent_states_are_in_place():
    rng = np.random.default_rng(0)
    rows = random_rows(rng, 8)
    states = [jnp.array(s) for s in random_states(rng, (TEMPORAL,), [(64,)], [np.float32], 80)]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states, batch, accepted, drafts):
        return jaxkv.recurrent.align_postprocess(
            states, batch, accepted, kinds=[TEMPORAL], num_drafts=drafts
        )

    drafts = rows.drafts.astype(np.int32)
    text = compiled(step, states, batch_of(rows), random_accepted(rng, rows), drafts)
    assert_in_place(text, states)


@pytest.mark.parametrize("algorithm", ["low_latency", "one_shot", "two_shot"])
def test_all_reduces_are_calls_in_program_order(algorithm):
    """One custom call each, no collective of XLA, no copy, and each after the previous one."""
    with memory_of(2) as memory:

        def step(x):
            for _ in range(3):
                x = jaxkv.all_reduce(memory, x, AXIS, implementation=algorithm) + 1
            return x

        spec = jax.P(AXIS)
        mapped = jax.shard_map(
            step, mesh=memory.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        x = jax.device_put(jnp.ones((2, 512)), jax.NamedSharding(memory.mesh, spec))
        text = compiled(jax.jit(mapped), x, devices=2)
    assert len([line for line in calls(text) if "jaxkv_all_reduce" in line]) == 3
    assert not re.search(r"\ball-reduce(-start)?\(", text)
    assert not copies(text)
