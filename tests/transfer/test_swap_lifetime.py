"""Buffers of started swaps in lowered programs: each outlives its copy."""

from functools import partial
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.transfer import buffer_lifetime
from tests.util.async_cases import OVERLAPPED
from tests.util.lowered_copies import Module, always_beside
from tests.util.swap_cases import CROSSINGS, MEMORIES, NAMES, SwapCase, SwapProgram, ids_for

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


@pytest.fixture(params=[(a, b) for a in MEMORIES for b in MEMORIES], ids=" to ".join)
def case(request) -> SwapCase:
    return SwapCase(*request.param)


@pytest.mark.parametrize("crossing", CROSSINGS.values(), ids=CROSSINGS)
@pytest.mark.parametrize("end", ["dropped", "finished", "returned"])
def test_copy_across_a_boundary_is_protected(case, crossing, end, named):
    @partial(jax.jit, donate_argnums=case.donated)
    def step(src, dst, *ids):
        swapping = crossing(jaxkv.start_swap(src, dst, *ids, implementation=named))
        if end == "dropped":
            return swapping.wait(1)
        return case.finish(swapping) if end == "finished" else swapping

    args = *case.arrays(), *ids_for(named)
    module = Module(step.lower(*args))
    assert not module.violations(0)
    delayed = any(module.joined) or module.boundary_waits > 0
    assert delayed == (end == "dropped")
    out = step(*args)
    if end == "finished":
        case.check(out)
    elif end == "returned":
        case.check(jax.jit(case.finish, donate_argnums=0)(out))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(MEMORIES), st.sampled_from(MEMORIES))
def test_buffers_of_random_programs_outlive_their_copies(seed, src_memory, dst_memory):
    case = SwapCase(src_memory, dst_memory)
    program = SwapProgram(case, OVERLAPPED[seed % len(OVERLAPPED)], seed)
    for module in (program.lowered(), program.continued()):
        assert not module.violations(seed)


def test_negative_control_lifetime_violation_is_detected():
    with mock.patch.object(buffer_lifetime, "_decide", always_beside):
        for memories in (MEMORIES, MEMORIES[::-1]):
            case = SwapCase(*memories)
            programs = [(seed, SwapProgram(case, OVERLAPPED[0], seed)) for seed in range(60)]
            assert any(program.lowered().violations(seed) for seed, program in programs)
            assert any(program.continued().violations(seed) for seed, program in programs)


@pytest.mark.parametrize("dst_memory", MEMORIES)
def test_source_of_the_program_is_needed_until_the_wait_for_its_array(dst_memory, named):
    """Not until the end of the copy: the waits for the arrays are its last uses."""
    case = SwapCase("device", dst_memory, "int8")

    @partial(jax.jit, donate_argnums=1)
    def step(src, dst, *ids):
        src = jax.tree.map(lambda array: array + 1, src)
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        return [swapping.wait(array) for array in range(3)]

    args = *case.arrays(), *ids_for(named)
    module = Module(step.lower(*args))
    assert module.joined == [False] and not module.violations(0)
    got = step(*args)
    src = {name: array + np.int8(1) for name, array in case.src.items()}
    case.check((None, dict(zip(NAMES, got, strict=True))), src=src)
