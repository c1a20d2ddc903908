"""`ErrorScope`: each scope has the errors of the calls traced in it, and no others."""

import concurrent.futures
import contextlib
import pickle
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import recurrent
from jaxkv._src.runtime.bounds import check_bounds
from jaxkv.metadata import BatchMetadata
from tests.util.async_cases import OVERLAPPED
from tests.util.transfer_cases import as_ids, distinct_ids, make_case

ROWS = 8
IN_NO_SCOPE = contextlib.nullcontext()


def batch_of(faults: int) -> BatchMetadata:
    """A batch with a block id out of range in `faults` rows."""
    table = [[99]] * faults + [[1]] * (ROWS - faults)
    return BatchMetadata.from_host(
        query_lens=[1] * ROWS,
        seq_lens=[4] * ROWS,
        block_table=table,
        max_num_reqs=ROWS,
        max_num_tokens=ROWS,
        max_blocks=1,
        block_size=4,
    )


def align(batch: BatchMetadata) -> jax.Array:
    """Counts an error for each bad row, on every platform."""
    states, _ = recurrent.align_postprocess(
        jnp.zeros((3, 8)),
        batch,
        jnp.ones(ROWS, jnp.int32),
        kinds=recurrent.StateKind.TEMPORAL,
        num_drafts=jnp.zeros(ROWS, jnp.int32),
    )
    return states


def counting_traces() -> tuple[list[BatchMetadata], Any]:
    """A jitted `align`, and a list that grows when it is traced."""
    traces: list[BatchMetadata] = []

    @jax.jit
    def step(batch):
        traces.append(batch)
        return align(batch)

    return traces, step


def faulty_wait(start_in=IN_NO_SCOPE, wait_in=IN_NO_SCOPE, *, named=None) -> object:
    """A wait for a handle that was not donated: an error for each array of the cache."""
    case = make_case()
    ids = [as_ids(pages, named) for pages in distinct_ids(case, 5)]
    with start_in:
        begin = jax.jit(partial(jaxkv.start_load, implementation=named), donate_argnums=1)
        loading = begin(case.pool(), case.cache(), *ids)
    with wait_in:
        return jax.jit(lambda loading: loading.cache)(loading)


WAIT_ERRORS = 2 * make_case().spec.num_layers  # K and V


def errors_of(check, *outputs: object) -> list[jaxkv.JaxkvError]:
    """The errors that a check raises; the next one raises none."""
    try:
        check(*outputs)
    except jaxkv.JaxkvError as error:
        return [error]
    except ExceptionGroup as group:
        return [error for error in group.exceptions if isinstance(error, jaxkv.JaxkvError)]
    finally:
        check()
    return []


def counts(scope: jaxkv.ErrorScope | None, *outputs: object) -> dict[type, int | None]:
    errors = errors_of(scope.check_errors if scope else jaxkv.check_errors, *outputs)
    for error in errors:
        assert error.scope == (scope.name if scope else None)
        assert (f"scope {error.scope})" in str(error)) == bool(scope)
    return {type(error): error.count for error in errors}


def pages(count: int) -> dict[type, int | None]:
    return {jaxkv.PageIndexError: count} if count else {}


def test_same_program_in_two_scopes_cold_and_warm():
    a, b = jaxkv.ErrorScope("program a"), jaxkv.ErrorScope("program b")
    traces, step = counting_traces()
    for round_number in range(3):
        with a:
            out_a = step(batch_of(1 + round_number))
        with b:
            out_b = step(batch_of(5))
        out = step(batch_of(2))
        assert counts(None, out) == pages(2)
        assert counts(b, out_b) == pages(5)
        assert counts(a, out_a) == pages(1 + round_number)
    assert len(traces) == 3


def test_scope_of_one_engine_is_not_drained_by_another():
    a, b = jaxkv.ErrorScope("drained a"), jaxkv.ErrorScope("drained b")
    with a:
        out = jax.jit(align)(batch_of(3))
    assert counts(b, out) == counts(None) == {}
    assert counts(a) == pages(3)


def test_innermost_scope_counts_and_the_outer_one_resumes():
    outer, inner = jaxkv.ErrorScope("outer"), jaxkv.ErrorScope("inner")
    step = jax.jit(align)
    with outer:
        with inner:
            out = [step(batch_of(1))]
            with outer:
                out.append(step(batch_of(2)))
        with contextlib.suppress(RuntimeError), inner:
            raise RuntimeError
        out.append(step(batch_of(4)))
        assert counts(inner, out) == pages(1)
        with pytest.raises(jaxkv.PageIndexError, match=r"^6 entries .*scope outer\)$"):
            jaxkv.check_errors()  # of the entered scope
    assert counts(outer) == counts(None) == {}


@pytest.mark.parametrize("call", ["eager", "disable_jit", "jit", "nested jit", "shard_map"])
def test_forms_of_a_call(call):
    scope = jaxkv.ErrorScope(f"form {call}")
    devices = min(2, jax.device_count())
    mesh = jax.make_mesh((devices,), ("x",))
    step: Any = {
        "eager": align,
        "nested jit": jax.jit(lambda batch: jax.jit(align)(batch)),
        "shard_map": jax.jit(
            jax.shard_map(
                lambda batch: align(batch)[None], mesh=mesh, in_specs=P(), out_specs=P("x")
            )
        ),
    }.get(call, jax.jit(align))
    with jax.disable_jit(call == "disable_jit"):
        out = [step(batch_of(1))]
        with scope:
            out.append(step(batch_of(3)))
    copies = devices if call == "shard_map" else 1
    assert counts(None, out) == pages(copies)
    assert counts(scope) == pages(3 * copies)


def test_traced_call_keeps_its_scope():
    scope, other = jaxkv.ErrorScope("traced"), jaxkv.ErrorScope("executed")
    with scope:
        traced = jax.jit(align).trace(batch_of(0))
    with other:
        out = traced.lower().compile()(batch_of(2))
    assert counts(scope, out) == pages(2)
    assert counts(other) == counts(None) == {}


@pytest.mark.parametrize("named", OVERLAPPED)
def test_wait_has_the_scope_in_which_it_was_traced(named):
    start, wait = jaxkv.ErrorScope("start"), jaxkv.ErrorScope("wait")
    out = faulty_wait(start, wait, named=named)
    (error,) = errors_of(wait.check_errors, out)
    assert (type(error), error.count) == (jaxkv.TransferError, WAIT_ERRORS)
    assert (error.scope, error.operation) == ("wait", "start_load")
    assert counts(start) == counts(None) == {}


def test_threads_have_scopes_of_their_own():
    threads = 4
    barrier = threading.Barrier(threads)
    step = jax.jit(align)

    def engine(number: int) -> None:
        scope = jaxkv.ErrorScope(f"engine {number}") if number else None
        entered = scope or IN_NO_SCOPE
        for _ in range(5):
            barrier.wait()
            with entered:
                out = [step(batch_of(number + 1)), step(batch_of(0)), step(batch_of(number + 2))]
            out.append(faulty_wait(entered, entered))
            barrier.wait()
            expected = {**pages(2 * number + 3), jaxkv.TransferError: WAIT_ERRORS}
            assert counts(scope, out) == expected

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(engine, number) for number in range(threads)]:
            done.result(timeout=300)


def test_new_thread_is_in_no_scope():
    with (
        jaxkv.ErrorScope("parent"),
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        out = pool.submit(jax.jit(align), batch_of(1)).result()
    assert counts(None, out) == pages(1)


def test_error_of_the_call_itself_names_the_scope():
    array = jnp.zeros((4, 8))
    with jaxkv.ErrorScope("call"), pytest.raises(jaxkv.PageIndexError) as raised:
        jaxkv.swap_blocks(array, array, [9], [0])
    assert raised.value.scope == "call"
    assert pickle.loads(pickle.dumps(raised.value)).scope == "call"


@pytest.mark.parametrize("name, error", [("", ValueError), (3, TypeError), (None, TypeError)])
def test_invalid_name_is_rejected(name, error):
    with pytest.raises(error, match=r"^ErrorScope: name must"):
        jaxkv.ErrorScope(name)


def test_names_of_equal_hash_are_rejected():
    jaxkv.ErrorScope("otkrjd")
    message = r"^ErrorScope: the names 'otkrjd' and 'drwouw' have the same hash; choose another"
    with pytest.raises(ValueError, match=message):
        jaxkv.ErrorScope("drwouw")


def test_with_statement_names_the_scope():
    with jaxkv.ErrorScope("a") as a, jaxkv.ErrorScope("b") as b:
        assert (a.name, b.name) == ("a", "b")


def test_equal_names_are_one_scope():
    a, same = jaxkv.ErrorScope("equal"), jaxkv.ErrorScope("equal")
    assert a == same and hash(a) == hash(same) and a != jaxkv.ErrorScope("unequal")
    traces, step = counting_traces()
    with a:
        step(batch_of(1))
    with same:
        out = step(batch_of(2))
    assert len(traces) == 1
    assert counts(a, out) == pages(3)


@pytest.mark.gpu
def test_copies_and_bounds_on_a_device(named_implementation):
    if named_implementation == "xla":
        pytest.skip("counts no errors")

    @jax.jit
    def step(src, dst, ids, rows):
        carry = check_bounds("test.step", jnp.arange(3), rows=(rows, 5))
        return jaxkv.swap_blocks(src, dst, ids, ids, implementation=named_implementation), carry

    scope = jaxkv.ErrorScope("device")
    src, dst = ({"k": jnp.zeros((8, 128))} for _ in range(2))
    for count in (3, 5, 7):
        ids = as_ids([100 + i for i in range(count)], named_implementation)
        with scope:
            out = step(src, dst, ids, 9)
        assert counts(scope, out) == {jaxkv.PageIndexError: count, jaxkv.BoundError: 1}
    assert counts(None) == {}


@pytest.mark.gpu
def test_groups_of_a_call_count_in_their_scope():
    """Blocks of two sizes, in one launch."""
    src, dst = ({"k": jnp.zeros((8, 128)), "v": jnp.zeros((8, 32))} for _ in range(2))
    ids = jnp.array([1, 100, 2, 101])
    step = jax.jit(partial(jaxkv.swap_blocks, implementation="kernel"))
    with jaxkv.ErrorScope("groups") as scope:
        out = step(src, dst, ids, ids)
    assert counts(scope, out) == pages(2)
    assert counts(None) == {}


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


LIMIT = """
import jaxkv
for i in range(255):
    jaxkv.ErrorScope(f"scope {i}")
for _ in range(2):
    try:
        jaxkv.ErrorScope("last")
    except ValueError as error:
        print(error)
with jaxkv.ErrorScope("scope 254"):
    jaxkv.check_errors()
"""


@pytest.mark.cpu_only
def test_number_of_scopes_is_limited():
    message = (
        "ErrorScope: 'last' would be scope 256 of this process, the limit is 255; reuse the names"
    )
    assert run(LIMIT).splitlines() == [message] * 2


CACHED = """
import sys, jax, jax.numpy as jnp, jaxkv
from jaxkv._src.runtime.bounds import check_bounds
from tests.runtime.test_error_scope import align, batch_of, counts

folder, *names = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None
)
scopes = {name: jaxkv.ErrorScope(name) for name in names}
bounds = {name: jax.jit(lambda carry, value, name=name:
                        check_bounds("test.step", carry, **{name: (value, 5)}))
          for name in names}
step = jax.jit(align)
carry = jnp.arange(3)
for name in sorted(names):
    jax.eval_shape(bounds[name], carry, 9)
batches = {name: batch_of(ord(name[-1]) - ord("a") + 1) for name in names}
for name, scope in scopes.items():
    with scope:
        before = len(hits)
        out = jax.block_until_ready(step(batches[name]))
        print(name, *counts(scope).values(), len(hits) - before)
        before = len(hits)
        try:
            jaxkv.check_errors(bounds[name](carry, 9))
        except Exception as error:
            print(f"needs 9, more than the bound {name} = 5" in str(error), len(hits) - before)
"""


@pytest.mark.cpu_only
def test_compilation_cache_of_a_process_with_another_order(tmp_path):
    """The second process finds all programs of the first, and its errors have the right names.

    The processes use the scopes in different orders, the bounds in the same.
    """
    names = ["scope_a", "scope_b", "scope_c"]

    def lines(order: list[str], hits: int) -> list[str]:
        return [
            line
            for name in order
            for line in (f"{name} {ord(name[-1]) - ord('a') + 1} {hits}", f"True {hits}")
        ]

    assert run(CACHED, tmp_path, *names).splitlines() == lines(names, 0)
    assert run(CACHED, tmp_path, *names[::-1]).splitlines() == lines(names[::-1], 1)


SERIALIZED = """
import pickle, sys, jax, jaxkv
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from tests.runtime.test_error_scope import align, batch_of, counts

path, action = sys.argv[1:]
if action == "write":
    with jaxkv.ErrorScope("serialized"):
        compiled = jax.jit(align).lower(batch_of(0)).compile()
    pickle.dump(serialize(compiled), open(path, "wb"))
else:
    jax.jit(align)(batch_of(0))  # loads the extension
    jaxkv.ErrorScope("first")
    step = deserialize_and_load(*pickle.load(open(path, "rb")))
    print(*counts(None, step(batch_of(2))).values())
    scope = jaxkv.ErrorScope("serialized")
    print(*counts(scope, step(batch_of(3))).values())
    print(*counts(None).values())
"""


@pytest.mark.cpu_only
def test_serialized_executable_keeps_its_scope(tmp_path):
    """Before this process knows the scope, its errors are those of no scope."""
    run(SERIALIZED, tmp_path / "executable", "write")
    assert run(SERIALIZED, tmp_path / "executable", "read").splitlines() == ["2", "3", ""]
