"""Loads that fail: no answer uses their pages."""

import jax
import numpy as np
import pytest

import jaxkv
from examples.serving.request import Request
from jaxkv._src.offload import step_result
from jaxkv._src.offload.page_memory import PoolMemory
from tests.examples.test_serving_engine import NEW_TOKENS, make_engine, prompts, run
from tests.util.sparse_cases import Pair

pytestmark = pytest.mark.end_to_end

NUM_HBM, NUM_HOST = 44, 120


@pytest.fixture(autouse=True)
def full_float32_products():
    with jax.default_matmul_precision("highest"):
        yield


def engine_with_wrong_blocks(token_budget):
    """The blocks of a prompt are in the host tier, with wrong bytes, and not in HBM."""
    engine = make_engine(num_hbm_pages=NUM_HBM, num_host_pages=NUM_HOST, token_budget=token_budget)
    prompt = prompts()[2]
    run(engine, [Request(prompt, NEW_TOKENS)])
    for first in range(3):
        run(engine, [Request([*range(first, 80 + first)], 8)])
    memory, ready = PoolMemory(engine.pool), engine.host.manager._blocks.ready
    for key in engine._hasher.hashes(prompt):
        for part in memory.parts(ready[key].page) if key in ready else ():
            part[:] = b"\x40" * len(part)  # 3.004, in float32
    return engine, prompt


def submit(engine, prompt, monkeypatch):
    """A request whose load is in flight, however fast the device is."""
    request = Request(prompt, NEW_TOKENS)
    engine.submit(request)
    with monkeypatch.context() as patched:
        patched.setattr(step_result, "is_over", lambda result: False)
        while not (request.placement and request.placement.load and request.placement.load.issued):
            engine.step()
    assert request.placement.loaded > 10 and not request.placement.load.done
    return request


def expected(prompt):
    engine = make_engine(num_hbm_pages=NUM_HBM)
    return run(engine, [Request(prompt, NEW_TOKENS)])


def assert_recovered(engine, prompt):
    """Later answers are right, computed, from HBM, and from the host tier."""
    answer = expected(prompt)
    for _ in range(2):
        assert run(engine, [Request(prompt, NEW_TOKENS)]) == answer
    for first in range(3):
        run(engine, [Request([*range(100 + first, 180 + first)], 8)])
    assert run(engine, [Request(prompt, NEW_TOKENS)]) == answer
    assert not engine._removed and not any(engine.blocks._references)


def test_what_a_cancelled_request_has_computed_from_them_is_not_found(monkeypatch):
    engine, prompt = engine_with_wrong_blocks(token_budget=40)
    prompt += [5] * 12
    request = submit(engine, prompt, monkeypatch)
    assert request.published > request.placement.found_in_hbm + request.placement.loaded
    engine.host.discard(request.placement.load.keys)
    engine.cancel(request)
    while engine.busy:
        engine.step()
    assert_recovered(engine, prompt)


@pytest.mark.parametrize("token_budget", [7, 40])
def test_a_running_request_is_computed_anew(token_budget, monkeypatch):
    """Its loaded pages are not stored again, and its tokens in flight do not count."""
    engine, prompt = engine_with_wrong_blocks(token_budget)
    prompt += [5] * 14
    request = submit(engine, prompt, monkeypatch)
    engine.host.discard(request.placement.load.keys)
    while engine.busy:
        engine.step()
    assert [request.answer] == expected(prompt) and request.preemptions == request.restarts == 1
    assert_recovered(engine, prompt)


@pytest.mark.parametrize("num_steps", [1, 6])
def test_no_token_of_a_step_whose_device_counted_an_error_is_answered(num_steps):
    """Such as a rejected page on a GPU, which does not fail the step."""
    engine, request = make_engine(num_host_pages=NUM_HOST), Request(prompts()[1], NEW_TOKENS)
    engine.submit(request)
    for _ in range(num_steps):
        engine.step()
    before = len(request.answer)
    jax.block_until_ready(Pair().fetch([[1, 99, 2], [1, 2, 3], [1, 2, 3]]))
    with pytest.raises(jaxkv.PageIndexError, match="not copied"):
        engine.step()
    assert len(request.answer) == before < NEW_TOKENS - 2


def test_no_token_of_a_step_that_timed_out_waiting_for_a_peer_is_answered(monkeypatch):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    with jaxkv.SymmetricMemory.create(mesh, "tp", max_bytes=1 << 20) as memory:
        engine, request = make_engine(memory=memory), Request(prompts()[1], NEW_TOKENS)
        engine.submit(request)
        for _ in range(4):  # a program that is traced checks, too
            engine.step()
        before = len(request.answer)

        def fail():
            raise jaxkv.PeerTimeoutError(0, 1, "barrier", 1, 0, "injected")

        monkeypatch.setattr(memory, "check_errors", fail)
        with pytest.raises(jaxkv.PeerTimeoutError, match="injected"):
            engine.step()
    assert len(request.answer) == before < NEW_TOKENS - 2
