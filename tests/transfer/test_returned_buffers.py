"""Results of a program that are arrays of a copy in flight have the buffers of these arrays.

JAX pairs donated arguments and results of equal type in order. What XLA makes of a program is in
tests/runtime/test_programs_for_gpu.py.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util.async_cases import OVERLAPPED, ids_of, start
from tests.util.lowered_copies import Module
from tests.util.transfer_cases import assert_rejected, make_case, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


def results_of_arguments(module: Module) -> dict[int, int]:
    """Donated argument -> the result that has its buffer."""
    signature = module.text.split("func.func public @main(")[1].split(") -> (")[0]
    arguments = re.split(r"%arg\d+: ", signature)[1:]
    found = [re.search(r"tf.aliasing_output = (\d+)", argument) for argument in arguments]
    return {i: int(match[1]) for i, match in enumerate(found) if match}


def draft_first(direction, named, pool, target, draft, x, *ids):
    started = start(direction, pool, target, *ids, implementation=named)
    return jax.tree.map(lambda layer: layer.at[1].set(x), draft), started


def other_array_first(direction, named, pool, target, draft, x, *ids):
    started = start(direction, pool, target, *ids, implementation=named)
    return jnp.full_like(target.layers[0][0], x), draft, started


def reversed_layers(direction, named, pool, target, draft, x, *ids):
    """Results in the opposite order of the arguments."""
    started = start(direction, pool, target, *ids, implementation=named)
    return jax.tree.leaves(started)[::-1], draft


def updated_before(direction, named, pool, target, draft, x, *ids):
    target, draft = (jax.tree.map(lambda a: a.at[1].set(x), cache) for cache in (target, draft))
    return draft, start(direction, pool, target, *ids, implementation=named)


def passed_through(direction, named, pool, target, draft, x, *ids):
    """No call of ours changes the argument that is returned in the place of another."""
    return draft, start(direction, pool, target, *ids, implementation=named)


PROGRAMS = [draft_first, other_array_first, reversed_layers, updated_before, passed_through]


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_array_in_flight_keeps_its_buffer(program, direction, named):
    case = make_case()
    _, ids = ids_of(case, 5, named)
    donated = (1, 2) if direction == "load" else (0, 1, 2)
    step = jax.jit(partial(program, direction, named), donate_argnums=donated)
    args = case.pool(), case.cache(), case.cache(), jnp.bfloat16(1), *ids
    module = Module(step.lower(*args))
    assert module.joined == [False] and not module.violations(0)
    pairs = results_of_arguments(module)
    assert len(set(pairs.values())) == len(pairs)
    layers = len(jax.tree.leaves(case.cache()))
    # `reversed_layers` returns the arrays of the target in this order, then the others.
    of_target = [pairs[1 + i] for i in range(layers)]
    assert of_target == sorted(of_target, reverse=program is reversed_layers)
    assert max(of_target) - min(of_target) == layers - 1

    pool, cache, draft, x, *ids = args
    out = jax.block_until_ready(step(pool, cache, draft, x, *ids))
    again = jax.jit(partial(program, direction, named))(
        case.pool(), case.cache(), case.cache(), x, *ids
    )
    arrays = zip(jax.tree.leaves(out), jax.tree.leaves(again), strict=True)
    for got, want in arrays:
        if got.dtype == jnp.bfloat16:
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_array_that_is_returned_twice_is_not_in_flight(named):
    """XLA copies one of the two results, and the caller may drop the other one."""
    case = make_case()
    _, ids = ids_of(case, 5, named)

    def step(pool, cache, *ids):
        return cache, start("store", pool, cache, *ids, implementation=named)

    module = Module(jax.jit(step, donate_argnums=(0, 1)).lower(case.pool(), case.cache(), *ids))
    assert module.joined == [True]


@pytest.mark.multigpu
@pytest.mark.parametrize("crossed", [False, True])
def test_sharded_arrays_that_xla_would_exchange_are_rejected(crossed, named):
    """XLA itself pairs donated arguments and results there, in order of their sizes; nor does it
    accept a wait outside `shard_map`."""
    case, mesh = make_case(), mesh_of(2)
    placed = {"mesh": mesh, "head_axis": "tp"}
    pool, target, draft = case.pool(**placed), case.cache(**placed), case.cache(**placed)
    sharding = jax.NamedSharding(mesh, jax.P())
    make = partial(jaxkv.HostIds, sharding=sharding) if named == "dma" else np.asarray
    ids = [make(side) for side in ids_of(case, 5, None)[0]]

    def start_on_shards(*args):
        return jaxkv.start_load(*args, implementation=named)

    like = jax.eval_shape(start_on_shards, case.pool(), case.cache(), *ids_of(case, 5, None)[0])
    of_dims = {1: jax.P("tp"), 4: jax.P(None, None, "tp"), 6: pool.partition_spec}
    specs = jax.tree.map(lambda leaf: of_dims[leaf.ndim], like)
    begin = jax.shard_map(
        start_on_shards, mesh=mesh, out_specs=specs, check_vma=False,
        in_specs=(pool.partition_spec, target.partition_spec, jax.P(), jax.P()),
    )  # fmt: skip

    @partial(jax.jit, donate_argnums=(1, 2))
    def step(pool, target, draft, *ids):
        draft = jax.tree.map(lambda layer: layer + 1, draft)
        started = begin(pool, target, *ids)
        return (draft, started) if crossed else (started, draft)

    if crossed:
        words = "a handle leaves", "in the order of the donated arguments"
        assert_rejected(lambda: step.lower(pool, target, draft, *ids), ValueError, *words)
        return
    text = step.lower(pool, target, draft, *ids).as_text()
    assert "jax.buffer_donor" in text
    assert "joined = true" not in text and "@jaxkv_wait_copy" not in text
