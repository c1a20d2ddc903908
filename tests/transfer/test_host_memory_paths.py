"""The number of paths that XLA follows in host memory, against a walk along all of them."""

import collections
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

import jaxkv
from jaxkv._src.transfer import dispatch
from jaxkv._src.transfer.host_memory_paths import num_visits
from tests.util.transfer_cases import assert_rejected

IDS = np.array([1, 2], np.int32)

pytestmark = pytest.mark.cpu_only  # lowers for a GPU that is not there


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    machine = dispatch.Machine("gpu", "NVIDIA H200", True)
    monkeypatch.setattr(dispatch, "_machine", lambda: machine)


def arrays(count, memory):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    return [jax.device_put(np.zeros((4, 8, 128), np.int8), sharding) for _ in range(count)]


def swap(src, dst):
    return jaxkv.swap_blocks(src, dst, IDS, IDS, implementation="kernel")


def start_and_wait(src, dst):
    return jaxkv.start_swap(src, dst, IDS, IDS, implementation="kernel").wait()


def repeated(call, times, src, dst):
    for _ in range(times):
        dst = call(src, dst)
    return dst


def lowered(step, num_arrays, memory="pinned_host"):
    traced = jax.jit(step, donate_argnums=1).trace(
        arrays(num_arrays, "device"), arrays(num_arrays, memory)
    )
    return traced.lower(lowering_platforms=("cuda",)).compiler_ir()


def walked(module):
    """Visits of a walk without memory through a program without calls, loops and branches."""
    (main,) = [op for op in module.body.operations if op.operation.name == "func.func"]
    kinds = map(ir.DictAttr, ir.ArrayAttr(main.operation.attributes["arg_attrs"]))
    queue = collections.deque(
        argument
        for argument, kind in zip(main.regions[0].blocks[0].arguments, kinds, strict=True)
        if "pinned_host" in str(kind)
    )
    visits = 0
    while queue:
        value = queue.popleft()
        for use in value.uses:
            user, results = use.owner.operation, []
            if user.name == "stablehlo.optimization_barrier":
                results = [user.results[use.operand_number]]
            elif user.name == "stablehlo.custom_call":
                aliases = map(
                    stablehlo.OutputOperandAlias, user.attributes["output_operand_aliases"]
                )
                if use.operand_number in [alias.operand_index for alias in aliases]:
                    results = list(user.results)
            visits += len(results)
            queue += results
    return visits


@pytest.mark.parametrize("call", [swap, start_and_wait])
@pytest.mark.parametrize(("times", "num_arrays"), [(1, 1), (5, 1), (1, 7), (2, 3), (3, 2)])
def test_visits_equal_those_of_a_walk(call, times, num_arrays):
    module = lowered(partial(repeated, call, times), num_arrays)
    assert num_visits(module) == walked(module) > 0


def test_arrays_that_the_program_moves_to_host_memory_have_paths():
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def step():
        src = [jnp.zeros((4, 8, 128))] * 3
        return swap(src, [jax.device_put(array, pinned) for array in src])

    module = jax.jit(step).trace().lower(lowering_platforms=("cuda",)).compiler_ir()
    assert num_visits(module) > 3 * 3


def test_device_memory_has_no_paths():
    assert num_visits(lowered(partial(repeated, start_and_wait, 3), 4, "device")) == 0


def test_paths_lead_through_inner_programs_branches_and_loops():
    def step(src, dst, wrap):
        return swap(src, wrap(lambda dst: swap(src, dst))(dst))

    def branch(call):
        return lambda dst: jax.lax.cond(jnp.sum(IDS) > 0, call, call, dst)

    def loop(call):
        return lambda dst: jax.lax.fori_loop(0, 9, lambda _, dst: call(dst), dst)

    plain = num_visits(lowered(partial(repeated, swap, 2), 5))
    inner = num_visits(lowered(partial(step, wrap=jax.jit), 5))
    assert plain <= inner < 1.2 * plain  # with the results of the inner program
    assert num_visits(lowered(partial(step, wrap=branch), 5)) > 1.5 * plain
    assert num_visits(lowered(partial(step, wrap=loop), 5)) > plain


@pytest.mark.parametrize("call", [swap, start_and_wait])
def test_programs_that_would_not_compile_are_refused(call):
    times = {swap: 6, start_and_wait: 3}[call]
    name = {swap: "swap_blocks", start_and_wait: "start_swap"}[call]
    words = name, "host memory", "paths", "limit 1e+09", "one array"
    assert_rejected(lambda: lowered(partial(repeated, call, times), 40), ValueError, *words)
    lowered(partial(repeated, call, times), 1)
