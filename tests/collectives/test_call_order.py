"""Order of the collectives of a program: each depends on the previous one, psum included."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.collectives import all_reduce
from tests.util import gpu_compiler
from tests.util.ranks import AXIS, assert_sums, memory_of, on_ranks, operand

pytestmark = [pytest.mark.multigpu, pytest.mark.usefixtures("multicast")]

CALL, PSUM = "@jaxkv_all_reduce", '"stablehlo.all_reduce"'


def collectives_of(text: str) -> list[tuple[str, set[str], str]]:
    """Kind and dependences of each collective of the function with the calls, and its own name."""
    function = next(part for part in text.split("func.func") if CALL in part)
    depends: dict[str, set[str]] = {}
    found = []
    for line in function.splitlines():
        if not (match := re.match(r" *%(\w+)(?::\d+)? = (.*)", line)):
            continue
        name, operation = match.groups()
        operands = set(re.findall(r"%(\w+)", operation))
        depends[name] = operands.union(*(depends.get(operand, set()) for operand in operands))
        if kind := next((kind for kind in (CALL, PSUM) if kind in operation), ""):
            found.append((kind, depends[name], name))
    return found


def assert_in_order(text: str) -> list[str]:
    """The kinds. Each depends on those before it, but psums in a row not on each other."""
    found = collectives_of(text)
    for i, (kind, depends, _) in enumerate(found):
        for before, _, name in found[:i]:
            assert name in depends or kind == before == PSUM, text
    return [kind for kind, _, _ in found]


@pytest.fixture
def few_bytes(monkeypatch):
    """Selects low_latency for the dtypes that it supports, whatever the devices."""
    select = all_reduce.select_implementation

    def selected(memory, x, implementation):
        supported = str(x.dtype) in all_reduce.DTYPES and x.size <= 8
        return select(memory, x, implementation or ("low_latency" if supported else "psum"))

    monkeypatch.setattr(all_reduce, "select_implementation", selected)


# ---------------------------------------------------------------------------------------------
# Calls


@pytest.mark.parametrize(
    "transform",
    [
        lambda body: body,
        lambda body: lambda x: jax.vmap(body)(x[None]),
        lambda body: lambda x: jax.jvp(body, (x,), (x,)),
        lambda body: lambda x: jax.jvp(jax.vmap(body), (x[None],), (x[None],)),
        lambda body: jax.vmap(lambda x: jax.jvp(body, (x,), (x,))),
        lambda body: lambda x: jax.grad(lambda x: sum(map(jnp.sum, body(x))))(x),
    ],
    ids=["plain", "vmap", "jvp", "jvp of vmap", "vmap of jvp", "grad"],
)
def test_calls_of_a_step(memories, transform):
    """Their own operands are independent."""
    memory = memories[2]
    reduce = partial(jaxkv.all_reduce, memory, axis_name=AXIS, implementation="low_latency")

    def body(x):  # only products of the results are kept
        return [jnp.sin(reduce(x + i)) * 2 for i in range(4)]

    step = on_ranks(memory, transform(body))
    text = step.lower(operand(2, (1, 8), "float32")).as_text()
    assert assert_in_order(text).count(CALL) == 4


# ---------------------------------------------------------------------------------------------
# psum


def mixed(memory, x):
    """Two arrays that fall back to psum, between others."""
    tree = {"a": x + 1, "b": jnp.tile(x, 9), "c": x + 2, "d": jnp.tile(x, 9) * 3}
    return jaxkv.all_reduce(memory, tree, AXIS)


def test_arrays_of_a_tree_that_fall_back(memories, few_bytes):
    memory = memories[2]
    step, x = on_ranks(memory, partial(mixed, memory)), operand(2, (8,), "float32")
    assert assert_in_order(step.lower(x).as_text()) == [CALL, CALL, PSUM, PSUM]
    got = step(x)
    assert [*got] == ["a", "b", "c", "d"]
    for total, rows in zip(
        got.values(), (x + 1, np.tile(x, 9), x + 2, np.tile(x, 9) * 3), strict=True
    ):
        assert_sums(total, rows)


def test_call_after_psum(memories, few_bytes):
    memory = memories[2]

    def step(x):
        return [
            jaxkv.all_reduce(memory, value, AXIS) for value in (jnp.tile(x, 9), x, jnp.tile(x, 9))
        ]

    text = on_ranks(memory, step).lower(operand(2, (8,), "float32")).as_text()
    assert assert_in_order(text) == [PSUM, CALL, PSUM]


@pytest.mark.parametrize(
    "transform",
    [
        lambda body: lambda x: jax.jvp(body, (x,), (x,)),
        lambda body: lambda x: jax.value_and_grad(lambda x: body(x).sum())(x),
    ],
    ids=["jvp", "grad"],
)
def test_psum_of_a_derivative(memories, transform):
    """Of a linear function: no data of the result is needed."""
    memory = memories[2]
    reduce = partial(jaxkv.all_reduce, memory, axis_name=AXIS, implementation="low_latency")
    text = on_ranks(memory, transform(reduce)).lower(operand(2, (8,), "float32")).as_text()
    assert assert_in_order(text) == [CALL, PSUM]


@pytest.mark.parametrize("name", ["low_latency", "psum"])
def test_no_barrier_if_all_are_of_one_kind(memories, name):
    memory = memories[2]

    def step(x):
        first = jaxkv.all_reduce(memory, [x, x * 2], AXIS, implementation=name)
        return first, jaxkv.all_reduce(memory, x * 3, AXIS, implementation=name)

    text = on_ranks(memory, step).lower(operand(2, (8,), "float32")).as_text()
    assert "optimization_barrier" not in text


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("vmapped", [False, True], ids=["plain", "vmap"])
def test_derivatives_of_a_tree_equal_psum(memories, few_bytes, check_vma, vmapped):
    memory = memories[2]
    x, tangent = (operand(2, (2, 4), "float32", seed) for seed in (1, 2))

    def derivatives(reduce):
        def body(x):
            totals = reduce({"a": jnp.tile(x, 9), "b": x, "c": x * x})
            return jnp.tile(jnp.sin(totals["b"]) * totals["c"], 9) * totals["a"]

        body = jax.vmap(body) if vmapped else body
        step = on_ranks(memory, body, check_vma=check_vma)
        value, forward = jax.jvp(step, (x,), (tangent,))
        inside = on_ranks(memory, lambda *xs: jax.jvp(body, xs[:1], xs[1:]), check_vma=check_vma)
        gradient = jax.grad(lambda x: step(x).sum())(x)
        second = jax.jvp(jax.grad(lambda x: step(x).sum()), (x,), (tangent,))[1]
        return value, forward, *inside(x, tangent), gradient, second

    actual = derivatives(lambda tree: jaxkv.all_reduce(memory, tree, AXIS))
    expected = derivatives(lambda tree: jax.lax.psum(tree, AXIS))
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.cpu_only
def test_schedule_of_an_h200(few_bytes):
    """XLA removes from a barrier what nothing else uses, and the barrier after scheduling."""
    gpu_compiler.require()
    x = operand(2, (8,), "float32")
    ends = {"jaxkv_all_reduce", "all-reduce-start", "all-reduce-done", "all-reduce"}

    def collectives(body):
        text = gpu_compiler.compiled(on_ranks(memory, body), x, devices=2)
        return [name for name in gpu_compiler.schedule(text) if name in ends]

    with memory_of(2) as memory:
        reduce = partial(jaxkv.all_reduce, memory, axis_name=AXIS)
        tree = collectives(partial(mixed, memory))
        assert tree[:2] == ["jaxkv_all_reduce"] * 2 and "jaxkv_all_reduce" not in tree[2:]
        assert len(tree) > 2
        forward = collectives(
            lambda x: jax.jvp(lambda x: [reduce(x + 1), reduce(x + 2)], (x,), (x * 3,))
        )
        one = ["jaxkv_all_reduce", "all-reduce-start", "all-reduce-done"]
        assert forward == one * 2
        after = collectives(lambda x: [reduce(jnp.tile(x, 9)), reduce(x)])
        assert after == [*one[1:], one[0]]
