"""Handles that programs pass on to each other, on one device and through `shard_map`."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.transfer.buffer_aliases import BufferAliases
from tests.util.async_cases import OVERLAPPED, finish, ids_of, start
from tests.util.lowered_copies import Module
from tests.util.transfer_cases import DIRECTIONS, assert_rejected, make_case, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")
CASE = make_case(num_kv_heads=4)


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


def pages_of_steps(named, *, sharding=None):
    """NumPy page ids of four copies of equal length, and the same as arguments."""
    numpy_ids = [ids_of(CASE, 4, None, seed)[0] for seed in range(4)]
    make = partial(jaxkv.HostIds, sharding=sharding) if named == "dma" else np.asarray
    return numpy_ids, [[make(side) for side in ids] for ids in numpy_ids]


def expected(direction, all_ids):
    """The case after one copy after another."""
    want = CASE
    for ids in all_ids:
        changed = {"host": want.host, "device": want.device} | want.expected(direction, *ids)
        want = type(CASE)(CASE.layout, changed["host"], changed["device"])
    return want


def next_copy(direction, named, started, pool, *ids):
    """Ends a copy and starts the next on the same arrays; `pool` is that of a load."""
    stored, cache = finish(direction, started)
    pool = pool if direction == "load" else stored
    return start(direction, pool, cache, *ids, implementation=named)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_program_that_ends_a_copy_and_starts_the_next_is_asynchronous(direction, named):
    """The plans have the same type: JAX would give the new one the buffer of the old one."""
    numpy_ids, (first, *rest) = pages_of_steps(named)
    donated = (1,) if direction == "load" else (0, 1)
    begin = jax.jit(partial(start, direction, implementation=named), donate_argnums=donated)
    started = begin(CASE.pool(), CASE.cache(), *first)
    pool = CASE.pool() if direction == "load" else None
    step = jax.jit(partial(next_copy, direction, named), donate_argnums=0)
    module = Module(step.lower(started, pool, *rest[0]), started)
    assert module.joined == [False] and not module.boundary_waits and not module.violations(0)
    for ids in rest:
        started = step(started, pool, *ids)
    stored, cache = jax.jit(partial(finish, direction), donate_argnums=0)(started)
    jaxkv.check_errors(cache)
    want = expected(direction, numpy_ids)
    want.assert_holds(pool if direction == "load" else stored, cache)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_plan_of_the_next_copy_keeps_away_from_every_donated_argument(tokens_first, named):
    """Also from one that no copy uses, but not from one that becomes a result."""
    _, (first, ids, *_) = pages_of_steps(named)
    begin = jax.jit(partial(start, "load", implementation=named), donate_argnums=1)
    started = begin(CASE.pool(), CASE.cache(), *first)
    like = jnp.zeros(4, jnp.int32) if started._plan is None else jnp.zeros_like(started._plan)

    def step(one, other, pool, *ids):
        tokens, started = (one, other) if tokens_first else (other, one)
        return next_copy("load", named, started, pool, *ids), tokens.at[0].set(1)

    args = (like, started) if tokens_first else (started, like)
    module = Module(jax.jit(step, donate_argnums=(0, 1)).lower(*args, CASE.pool(), *ids))
    assert module.joined == [False] and not module.boundary_waits


def test_plan_is_not_freed_before_the_end_of_its_copy(named):
    """The caller donates it and may drop it: the first wait is for the entire copy."""
    _, (first, ids, *_) = pages_of_steps(named)
    begin = jax.jit(partial(start, "load", implementation=named), donate_argnums=1)
    started = begin(CASE.pool(), CASE.cache(), *first)

    def step(cache, started, pool, *ids):
        k, _ = started.wait(0)
        return k.sum(), start("load", pool, cache, *ids, implementation=named)

    args = CASE.cache(), started, CASE.pool(), *ids
    module = Module(jax.jit(step, donate_argnums=(0, 1)).lower(*args))
    assert module.joined == [False] and not module.boundary_waits
    segments = re.findall(r"segment = (-?\d+) ", module.text)
    assert segments == ["0" if started._plan is None else "2"]


class OnShards:
    """Programs on the shards of two devices; with `as_leaves` a handle crosses as its leaves."""

    def __init__(self, direction, named, axis_type, as_leaves=False):
        self.direction, self.named, self.as_leaves = direction, named, as_leaves
        self.mesh = mesh_of(2, axis_type)
        pool, cache = self.state()
        self.of_state = pool.partition_spec, cache.partition_spec
        of_dims = {1: jax.P("tp"), 4: cache.partition_spec, 6: pool.partition_spec}
        like = jax.eval_shape(
            partial(start, direction), CASE.pool(), CASE.cache(), *ids_of(CASE, 4, None)[0]
        )
        self.structure = jax.tree.structure(like)
        self.of_handle = jax.tree.map(lambda leaf: of_dims[leaf.ndim], like)
        if named == "dma":  # no plan
            self.of_handle._plan = None
        if as_leaves:
            self.of_handle = jax.tree.leaves(self.of_handle)
        self.everywhere = jax.NamedSharding(self.mesh, jax.P())

    def state(self):
        placed = {"mesh": self.mesh, "head_axis": "tp"}
        return CASE.pool(**placed), CASE.cache(**placed)

    def mapped(self, step, in_specs, out_specs):
        return jax.shard_map(
            step, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def outward(self, started):
        if not self.as_leaves:
            return started
        leaves, self.structure = jax.tree.flatten(started)
        return leaves

    def inward(self, crossing):
        return jax.tree.unflatten(self.structure, crossing) if self.as_leaves else crossing

    def begin(self, pool, cache, *ids):
        def step(*args):
            return self.outward(start(self.direction, *args, implementation=self.named))

        in_specs = (*self.of_state, jax.P(), jax.P())
        return self.mapped(step, in_specs, self.of_handle)(pool, cache, *ids)

    def end(self, crossing):
        def step(crossing):
            stored, cache = finish(self.direction, self.inward(crossing))
            return cache if stored is None else (stored, cache)

        out_specs = self.of_state[1] if self.direction == "load" else self.of_state
        return self.mapped(step, (self.of_handle,), out_specs)(crossing)

    def restart(self, crossing, pool, *ids):
        def step(crossing, *args):
            started = next_copy(self.direction, self.named, self.inward(crossing), *args)
            return self.outward(started)

        of_pool = self.of_state[0] if self.direction == "load" else None
        in_specs = self.of_handle, of_pool, jax.P(), jax.P()
        return self.mapped(step, in_specs, self.of_handle)(crossing, pool, *ids)

    def check(self, out, pool, numpy_ids):
        stored, cache = (pool, out) if self.direction == "load" else out
        jaxkv.check_errors(out)
        expected(self.direction, numpy_ids).assert_holds(stored, cache)


def in_scan(programs, *args):
    """A loop carries the handle past its pytree boundaries."""
    started, _ = jax.lax.scan(lambda h, x: (h, x), programs.begin(*args), jnp.arange(3))
    return programs.end(started)


WITHIN = {
    "two shard_maps": lambda programs, *args: programs.end(programs.begin(*args)),
    "barrier": lambda programs, *args: programs.end(
        jax.lax.optimization_barrier(programs.begin(*args))
    ),
    "inner jits": lambda programs, *args: jax.jit(programs.end)(jax.jit(programs.begin)(*args)),
    "scan": in_scan,
}


@pytest.mark.multigpu
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("direction", DIRECTIONS)
class TestOnShards:
    @pytest.mark.parametrize("as_leaves", [False, True], ids=["pytree", "leaves"])
    def test_programs_that_end_a_copy_and_start_the_next(
        self, direction, axis_type, as_leaves, named
    ):
        programs = OnShards(direction, named, axis_type, as_leaves)
        numpy_ids, (first, *rest) = pages_of_steps(named, sharding=programs.everywhere)
        pool, cache = programs.state()
        donated = (1,) if direction == "load" else (0, 1)
        crossing = jax.jit(programs.begin, donate_argnums=donated)(pool, cache, *first)
        pool = pool if direction == "load" else None
        step = jax.jit(programs.restart, donate_argnums=0)
        text = step.lower(crossing, pool, *rest[0]).as_text()
        assert "joined = true" not in text and not re.search(r"boundary = dense<(?!>)", text)
        for ids in rest:
            crossing = step(crossing, pool, *ids)
        programs.check(jax.jit(programs.end, donate_argnums=0)(crossing), pool, numpy_ids)

    @pytest.mark.parametrize("passed_on", [False, True])
    def test_copy_that_another_program_ends(self, direction, axis_type, passed_on, named):
        programs = OnShards(direction, named, axis_type)
        numpy_ids, (ids, *_) = pages_of_steps(named, sharding=programs.everywhere)
        pool, cache = programs.state()
        donated = (1,) if direction == "load" else (0, 1)
        begin = jax.jit(programs.begin, donate_argnums=donated)
        assert "joined = true" not in begin.lower(pool, cache, *ids).as_text()
        started = begin(pool, cache, *ids)
        if passed_on:
            pass_on = jax.jit(lambda started, x: (started, x + 1), donate_argnums=0)
            started, _ = pass_on(started, 1.0)
        end = jax.jit(programs.end, donate_argnums=0)
        programs.check(end(started), pool, numpy_ids[:1])

    @pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
    def test_handle_leaves_a_shard_map_within_a_program(self, direction, axis_type, within, named):
        programs = OnShards(direction, named, axis_type)
        numpy_ids, (ids, *_) = pages_of_steps(named, sharding=programs.everywhere)
        pool, cache = programs.state()
        donated = (1,) if direction == "load" else (0, 1)
        step = jax.jit(partial(within, programs), donate_argnums=donated)
        text = step.lower(pool, cache, *ids).as_text()
        assert "joined = true" not in text and not re.search(r"boundary = dense<(?!>)", text)
        programs.check(step(pool, cache, *ids), pool, numpy_ids[:1])


@pytest.mark.multigpu
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_array_that_shards_return_twice_is_not_in_flight(axis_type, named):
    programs = OnShards("load", named, axis_type)
    _, (ids, *_) = pages_of_steps(named, sharding=programs.everywhere)
    pool, cache = programs.state()

    def step(*args):
        leaves = jax.tree.leaves(start("load", *args, implementation=named))
        return [*leaves, leaves[-1]]

    begin = programs.mapped(step, (*programs.of_state, jax.P(), jax.P()), jax.P("tp"))
    text = jax.jit(begin, donate_argnums=1).lower(pool, cache, *ids).as_text()
    assert "joined = true" in text or re.search(r"boundary = dense<(?!>)", text)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_leaves_of_a_handle_without_donation_name_jax_debug_nans(direction, named):
    """They bypass the check of the pytree."""
    structures = []

    def begin(*args):
        leaves, structure = jax.tree.flatten(start(direction, *args, implementation=named))
        structures.append(structure)
        return leaves

    def end(leaves):
        return finish(direction, jax.tree.unflatten(structures[0], leaves))

    _, (ids, *_) = pages_of_steps(named)
    state = CASE.pool(), CASE.cache()
    leaves = jax.jit(begin, donate_argnums=1)(*state, *ids)
    words = "jax_debug_nans", "donation", "in the program that starts the copy"
    with jax.debug_nans(True):
        lower = jax.jit(begin, donate_argnums=1).lower
        assert_rejected(lambda: lower(CASE.pool(), CASE.cache(), *ids), RuntimeError, *words)
        lower = jax.jit(end, donate_argnums=0).lower
        assert_rejected(lambda: lower(leaves), RuntimeError, *words)
    jax.block_until_ready(jax.jit(end, donate_argnums=0)(leaves))


def test_analysis_is_linear_in_the_number_of_layers(monkeypatch):
    calls = []
    origins = BufferAliases.origins

    def counted(aliases, value):
        calls.append(value)
        return origins(aliases, value)

    monkeypatch.setattr(BufferAliases, "origins", counted)

    def num_calls(num_layers):
        case = make_case(num_layers=num_layers, kind="mla", dtype="int8")
        _, ids = ids_of(case, 4, OVERLAPPED[0])

        def step(pool, cache, x, *ids):
            loading = start("load", pool, cache, *ids, implementation=OVERLAPPED[0])
            for layer in range(num_layers):
                x = x + loading.wait(layer, after=x)[0].sum()
            return x, start("store", pool, loading.cache, *ids, implementation=OVERLAPPED[0])

        calls.clear()
        args = case.pool(), case.cache(), jnp.int32(0), *ids
        assert Module(jax.jit(step, donate_argnums=(0, 1)).lower(*args)).joined == [False] * 2
        return len(calls)

    assert num_calls(40) <= 4 * num_calls(10)
