"""Signatures of calls within a process; test_multiprocess.py compares those of several."""

import functools
import itertools
import re
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

import jaxkv
from jaxkv._src.runtime.custom_calls import target_of
from tests.util.ranks import AXIS, assert_sums, memory_of, on_ranks, operand, sums

pytestmark = pytest.mark.multigpu

X = operand(2, (8,), "float32")


@pytest.fixture(scope="module")
def memory():
    with memory_of(2) as memory:
        yield memory
        memory.check_errors()


def signatures(memory, body) -> list[int]:
    text = on_ranks(memory, body).lower(X).as_text()
    return [int(number) for number in re.findall(r"signature = (\d+)", text)]


def test_signature_is_stable_across_lowerings(memory):
    def body(x):
        return jaxkv.all_reduce(memory, jaxkv.all_reduce(memory, x, AXIS) * 2, AXIS)

    first, second = signatures(memory, body)
    assert 0 < first < 2**52 and 0 < second < 2**52 and first != second
    assert signatures(memory, body) == [first, second]
    with memory_of(2) as other:  # has another number, which is not part of it
        assert signatures(memory, lambda x: jaxkv.all_reduce(other, x, AXIS)) == signatures(
            memory, lambda x: jaxkv.all_reduce(memory, x, AXIS)
        )


def test_nested_lowering_does_not_end_the_outer_one(memory):
    """The inner program has no call, and whether JAX lowers it depends on its caches."""
    inner = Primitive("lowers_another_program")
    inner.def_abstract_eval(lambda x: x)

    def lower(_, x):
        jax.block_until_ready(jax.jit(lambda y: y + 1)(jnp.zeros(3)))
        return [x]

    mlir.register_lowering(inner, lower)

    def body(factor):
        return lambda x: inner.bind(jaxkv.all_reduce(memory, x, AXIS)) * factor

    twice = signatures(memory, body(2))
    assert twice == signatures(memory, body(2)) != signatures(memory, body(3))


def calls_of_blocks(module) -> list[list[ir.Operation]]:
    """The all_reduce calls of a lowered module, by block."""
    found: dict[ir.Block, list[ir.Operation]] = {}

    def visit(operation):
        if target_of(operation.operation) == "jaxkv_all_reduce":
            found.setdefault(operation.operation.block, []).append(operation.operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return list(found.values())


def test_each_call_takes_the_token_of_the_previous_one(memory):
    """Also behind an inner program, a loop, or the lowering of another program with a call."""
    reduce = functools.partial(jaxkv.all_reduce, memory, axis_name=AXIS)
    other = on_ranks(memory, lambda x: reduce(reduce(x)) - 1).trace(X)
    lowered = []
    inner = Primitive("lowers_another_all_reduce")
    inner.def_abstract_eval(lambda x: x)

    def lower(_, x):
        lowered.append(other.lower())
        return [x]

    mlir.register_lowering(inner, lower, cacheable=False)

    def loop(x, _):
        return reduce(reduce(x) + 1) * 2, None

    def body(x):
        x = reduce(inner.bind(reduce(reduce(x) * 2)) + 1)
        x, _ = jax.lax.scan(loop, x, length=3)
        return reduce(jax.jit(reduce)(reduce(x)))

    lowered.append(on_ranks(memory, body).lower(X))
    assert len(lowered) == 2
    for program, lengths in zip(lowered, ([2], [1, 2, 5]), strict=True):
        module = program.compiler_ir("stablehlo")
        with module.context:
            blocks = calls_of_blocks(module)
            assert sorted(map(len, blocks)) == lengths
            for first, *others in blocks:
                assert first.operands[1].owner.name == "stablehlo.constant"
                for earlier, later in itertools.pairwise([first, *others]):
                    assert later.operands[1] == earlier.results[1]


@pytest.mark.parametrize("world_size", [2, 8])
def test_concurrent_programs_of_threads(world_size):
    """With one program and with two; XLA launches each on all devices before the next."""
    wrong = []

    def run(step, x):
        for _ in range(200):
            try:
                assert_sums(jax.block_until_ready(step(x)), x)
            except (AssertionError, jax.errors.JaxRuntimeError) as error:
                wrong.append(error)

    with memory_of(world_size) as memory:
        steps = [sums(memory, name) for name in ("low_latency", "low_latency", "one_shot")]
        steps[1] = steps[0]
        operands = [operand(world_size, (64,), "float32", seed) for seed in range(3)]
        threads = [
            threading.Thread(target=run, args=arguments)
            for arguments in zip(steps, operands, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        memory.check_errors()
    assert not wrong
