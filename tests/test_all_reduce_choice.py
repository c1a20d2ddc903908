"""`all_reduce`: what it chooses, what it refuses, and what it says of both."""

import dataclasses

import jax
import numpy as np
import pytest
from ranks import AXIS, BY_SWITCH, MAX_BYTES, assert_sums, memory_of, on_ranks, operand, sums

import jaxkv
from jaxkv import all_reduce
from jaxkv.tuning.all_reduce import VARIABLE, packaged_table, table_for

pytestmark = [pytest.mark.multigpu, pytest.mark.usefixtures("multicast")]


def test_the_table_decides_either_side_of_its_bounds(memories):
    memory = memory_of(2, max_bytes=8 << 20)
    table = table_for(memory.mesh.devices.flat[0].device_kind)
    for least, algorithm in table.rules[2]:
        x = jax.ShapeDtypeStruct((least // 2,), "bfloat16")
        assert all_reduce.choose(memory, x, None)[0] == algorithm
        if least:
            below = jax.ShapeDtypeStruct((least // 2 - 1,), "bfloat16")
            assert all_reduce.choose(memory, below, None)[0] != algorithm
    memory.close()


@pytest.mark.parametrize(
    "algorithm, limit",
    [
        ("low_latency", "quick_bytes"),
        ("one_shot", "slot_bytes"),
        *((name, "max_bytes") for name in ("two_shot", *BY_SWITCH)),
    ],
)
def test_the_largest_message(memories, algorithm, limit):
    memory = memories[2]
    n = getattr(memory, limit) // 4
    x = operand(2, (n,), "float32")
    assert_sums(sums(memory, algorithm)(x), x)
    with pytest.raises(NotImplementedError, match=f"{(n + 1) * 4} bytes exceed {limit} = {n * 4}"):
        sums(memory, algorithm)(operand(2, (n + 1,), "float32"))


@pytest.mark.parametrize("shape, dtype", [((MAX_BYTES,), "float32"), ((10,), "int32")])
def test_psum_serves_the_rest(memories, shape, dtype):
    memory = memories[2]
    x = operand(2, shape, dtype)
    assert all_reduce.choose(memory, x[0], None)[0] == "psum"
    assert_sums(sums(memory)(x), x)


def test_explain(memories, tmp_path, monkeypatch):
    x = {"a": np.ones(3, np.float32), "b": np.ones(3, np.int32)}
    default = packaged_table("any")
    table = dataclasses.replace(default, rules=default.rules | {2: ((0, "low_latency"),)})
    (tmp_path / "table.json").write_text(table.to_text())
    monkeypatch.setenv(VARIABLE, str(tmp_path / "table.json"))
    text = jaxkv.explain(memories[2].all_reduce, x, AXIS)
    first, second = text.splitlines()
    assert first.startswith("all_reduce of float32[3]: low_latency (best by ")
    assert second.startswith("all_reduce of int32[3]: psum (low_latency is best by ")
    assert second.endswith("but its dtype must be one of bfloat16, float16, float32, got int32)")


def test_what_is_wrong_is_said_while_tracing(memories):
    memory = memories[2]
    x = operand(2, (4,), "float32")
    with pytest.raises(
        ValueError, match="one of low_latency, one_shot, two_shot, multimem, psum, got 'nccl'"
    ):
        sums(memory, "nccl")(x)
    with pytest.raises(NotImplementedError, match=r"'one_shot' does not serve.*got int32"):
        sums(memory, "one_shot")(x.astype(np.int32))
    with pytest.raises(ValueError, match=r"axis_name must be 'tp'.*got 'dp'"):
        on_ranks(memory, lambda x: memory.all_reduce(x, "dp"))(x)
    with pytest.raises(ValueError, match=r"mesh \{'tp': 2\}, got none"):
        memory.all_reduce(x, AXIS)


def test_another_mesh_is_refused(memories):
    if 4 not in memories:
        pytest.skip("needs 4 devices")
    x = operand(4, (4,), "float32")
    with pytest.raises(ValueError, match=r"mesh \{'tp': 2\}, got \{'tp': 4\}"):
        on_ranks(memories[4], lambda x: memories[2].all_reduce(x, AXIS))(x)
