"""`all_reduce`: choice of the implementation, rejected calls, and their messages."""

import dataclasses
import re
from functools import partial

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._src.collectives import all_reduce
from jaxkv._src.tuning.all_reduce_table import VARIABLE, packaged_table, table_for
from tests.util.ranks import (
    AXIS,
    MAX_BYTES,
    MULTICAST,
    assert_sums,
    memory_of,
    on_ranks,
    operand,
    sums,
)

pytestmark = [pytest.mark.multigpu, pytest.mark.usefixtures("multicast")]


def test_table_selects_at_rule_boundaries(memories):
    memory = memory_of(2, max_bytes=8 << 20)
    table = table_for(memory.mesh.devices.flat[0].device_kind)
    for least, algorithm in table.rules[2]:
        x = jax.ShapeDtypeStruct((max(least, 16) // 2,), "bfloat16")  # an empty one needs no kernel
        assert all_reduce.select_implementation(memory, x, None)[0] == algorithm
        if least:
            below = jax.ShapeDtypeStruct((least // 2 - 1,), "bfloat16")
            assert all_reduce.select_implementation(memory, below, None)[0] != algorithm
    memory.close()


@pytest.mark.parametrize(
    "algorithm, limit",
    [
        ("low_latency", "low_latency_bytes"),
        ("one_shot", "slot_bytes"),
        *((name, "max_bytes") for name in ("two_shot", *MULTICAST)),
    ],
)
def test_message_size_limit(memories, algorithm, limit):
    memory = memories[2]
    n = getattr(memory, limit) // 4
    x = operand(2, (n,), "float32")
    assert_sums(sums(memory, algorithm)(x), x)
    with pytest.raises(NotImplementedError, match=f"{(n + 1) * 4} bytes exceed {limit} = {n * 4}"):
        sums(memory, algorithm)(operand(2, (n + 1,), "float32"))


@pytest.mark.parametrize("shape, dtype", [((MAX_BYTES,), "float32"), ((10,), "int32")])
def test_unsupported_call_falls_back_to_psum(memories, shape, dtype):
    memory = memories[2]
    x = operand(2, shape, dtype)
    assert all_reduce.select_implementation(memory, x[0], None)[0] == "psum"
    assert_sums(sums(memory)(x), x)


@pytest.fixture
def use_table(tmp_path, monkeypatch):
    """Installs a table with this algorithm for 2 devices, for memories created later."""

    def use(algorithm):
        default = packaged_table("any")
        table = dataclasses.replace(default, rules=default.rules | {2: ((0, algorithm),)})
        path = tmp_path / f"{algorithm}.json"
        path.write_text(table.to_text())
        monkeypatch.setenv(VARIABLE, str(path))

    return use


def test_explain_reports_each_array(use_table):
    use_table("low_latency")
    x = {"a": np.ones(3, np.float32), "b": np.ones(3, np.int32)}
    with memory_of(2) as memory:
        first, second = jaxkv.explain(jaxkv.all_reduce, memory, x, AXIS).splitlines()
    assert first == "all_reduce of float32[3]: low_latency (selected by low_latency.json)"
    assert second.startswith("all_reduce of int32[3]: psum (fallback from low_latency of ")
    assert second.endswith(": dtype must be one of bfloat16, float16, float32, got int32)")


@pytest.mark.parametrize("requested", [None, "one_shot", "psum"])
def test_explain_reports_psum_of_empty_arrays(use_table, requested):
    use_table("low_latency")
    x = np.ones((2, 0), np.float32)
    with memory_of(2) as memory:
        text = jaxkv.explain(jaxkv.all_reduce, memory, x[0], AXIS, implementation=requested)
        step = sums(memory, requested)
        assert "jaxkv_all_reduce" not in step.lower(x).as_text()
        assert step(x).shape == x.shape
    why = {None: "instead of low_latency: the array is empty", "psum": "requested"}
    expected = why.get(requested, "instead of one_shot: the array is empty")
    assert text == f"all_reduce of float32[0]: psum ({expected})"


@pytest.mark.parametrize("x", [1.0, np.float64(1), np.zeros((), np.float32)], ids=repr)
def test_explain_accepts_scalars(memories, x):
    memory = memories[2]
    text = jaxkv.explain(jaxkv.all_reduce, memory, x, AXIS)
    assert text.startswith("all_reduce of float32[]: ")
    step = on_ranks(memory, lambda y: y + jaxkv.all_reduce(memory, x, AXIS))
    assert (np.asarray(step(np.zeros(2))) == 2 * x).all()


def test_table_is_fixed_at_creation(use_table):
    """Otherwise processes could choose differently, each by its own environment."""
    use_table("low_latency")
    with memory_of(2) as memory:
        use_table("two_shot")
        text = jaxkv.explain(jaxkv.all_reduce, memory, np.ones(3, np.float32), AXIS)
        assert "low_latency (selected by low_latency.json)" in text
    with memory_of(2) as memory:
        text = jaxkv.explain(jaxkv.all_reduce, memory, np.ones(3, np.float32), AXIS)
        assert "two_shot (selected by two_shot.json)" in text


def test_invalid_table_raises_at_creation(monkeypatch):
    monkeypatch.setenv(VARIABLE, __file__)
    with pytest.raises(ValueError, match=f"tuning table {re.escape(__file__)}: "):
        memory_of(2)


def test_invalid_arguments_raise_while_tracing(memories):
    memory = memories[2]
    x = operand(2, (4,), "float32")
    with pytest.raises(
        ValueError, match="one of low_latency, one_shot, two_shot, multimem, psum, got 'nccl'"
    ):
        sums(memory, "nccl")(x)
    with pytest.raises(NotImplementedError, match=r"'one_shot' does not support.*got int32"):
        sums(memory, "one_shot")(x.astype(np.int32))
    with pytest.raises(ValueError, match=r"axis_name must be 'tp'.*got 'dp'"):
        on_ranks(memory, lambda x: jaxkv.all_reduce(memory, x, "dp"))(x)
    with pytest.raises(ValueError, match=r"mesh \{'tp': 2\} of memory, got none"):
        jaxkv.all_reduce(memory, x, AXIS)


@pytest.mark.parametrize("call", [jaxkv.all_reduce, partial(jaxkv.explain, jaxkv.all_reduce)])
def test_order_of_the_arguments_of_psum_raises(memories, call):
    with pytest.raises(
        TypeError, match=r"memory must be .*got an array; .*\(memory, x, axis_name\)"
    ):
        call(np.ones(3, np.float32), memories[2], AXIS)


def test_different_mesh_raises(memories):
    if 4 not in memories:
        pytest.skip("needs 4 devices")
    x = operand(4, (4,), "float32")
    with pytest.raises(ValueError, match=r"mesh \{'tp': 2\} of memory, got \{'tp': 4\}"):
        on_ranks(memories[4], lambda x: jaxkv.all_reduce(memories[2], x, AXIS))(x)


def test_different_device_order_raises():
    """A device's rank is its position in the memory's mesh: the sums would be of other rows."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, other = (jax.sharding.Mesh(d, ("dp", AXIS)) for d in (devices, devices.T))
    renamed = jax.sharding.Mesh(devices.T, (AXIS, "dp"))
    x = operand(4, (3,), "float32").reshape(2, 2, 3)

    def step(mesh):
        spec = jax.P("dp", AXIS)
        body = lambda x: jaxkv.all_reduce(memory, x, AXIS, implementation="one_shot")  # noqa: E731
        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    with jaxkv.SymmetricMemory.create(mesh, AXIS, max_bytes=4096) as memory:
        for same in (mesh, renamed):  # along the axis
            assert (np.asarray(step(same)(x)) == x.sum(1, keepdims=True)).all()
        ids = [[device.id for device in row] for row in devices]
        with pytest.raises(ValueError) as raised:
            step(other)(x)
    assert str(raised.value) == (
        f"all_reduce: must run in a jax.shard_map over the mesh of memory, whose devices along "
        f"'tp' are {ids}, got a mesh of the same shape with {np.transpose(ids).tolist()}"
    )
