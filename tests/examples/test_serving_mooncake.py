"""The serving engine on a Mooncake Store, whose master is killed and started again."""

import time
from contextlib import closing

import numpy as np
import pytest

import jaxkv
from examples.serving.engine import Engine, Limits
from examples.serving.presets import init_params
from examples.serving.request import Request
from jaxkv._src.offload.tiers import mooncake
from tests.util.mooncake_master import start_master
from tests.util.serving_checks import CONFIG
from tests.util.tier_blocks import TIMEOUT_S

pytestmark = [pytest.mark.cpu_only, pytest.mark.end_to_end]

TIER_TIMEOUT_S = 10.0  # of a prefetch: the machine may be busy
NUM_PAGES = 32  # in HBM, and in host memory
NUM_CONVERSATIONS, QUESTION, NEW_TOKENS = 4, 17, 3


@pytest.fixture
def master(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake, "_CONTAINS_WITHIN_S", 2.0)
    monkeypatch.setattr(mooncake, "_RETRY_AFTER_S", 0.1)
    with start_master(tmp_path) as master:
        yield master


def make_engine(num_hbm_pages, num_host_pages=0, **options):
    limits = Limits(4, batch=2, token_budget=48, pages_per_request=32, copy_pages=32)
    params = init_params(CONFIG, 1, "float32")
    return Engine(CONFIG, params, limits, num_hbm_pages, num_host_pages, **options)


def serve(engine, prompts, event=None):
    """Sequences with their answers; `event` happens in the middle."""
    requests = [Request(prompt, NEW_TOKENS) for prompt in prompts]
    for request in requests:
        within_timeout(engine.submit, request)
    while engine.busy:
        within_timeout(engine.step)
        if event and any(request.finished for request in requests):
            event()
            event = None
    jaxkv.check_errors(engine.state)
    return [request.tokens for request in requests]


def within_timeout(call, *arguments):
    """Fails if a call waits for the store; the limit leaves time to compile a program."""
    start = time.monotonic()
    call(*arguments)
    assert time.monotonic() - start < TIER_TIMEOUT_S


class Conversations:
    """Turns of an engine with a tier, compared with those of one that computes all pages anew."""

    def __init__(self, engine):
        self.engine, self.other = engine, make_engine(NUM_PAGES)
        self.rng, self.histories = np.random.default_rng(3), [list[int]()] * NUM_CONVERSATIONS

    def turn(self, event=None):
        questions = self.rng.integers(0, 256, (len(self.histories), QUESTION)).tolist()
        prompts = [h + q for h, q in zip(self.histories, questions, strict=True)]
        self.histories = serve(self.other, prompts)
        assert serve(self.engine, prompts, event) == self.histories

    def again(self):
        """The last turn."""
        prompts = [history[:-NEW_TOKENS] for history in self.histories]
        assert serve(self.engine, prompts) == self.histories


def test_answers_are_right_while_the_master_is_away(master):
    opened = []

    def tiers(pool):
        opened.append(master.tier(jaxkv.OffloadEngine.tier_block_bytes(pool)))
        return opened

    engine = make_engine(NUM_PAGES, NUM_PAGES, layout="page_first_direct", tiers=tiers, weights="a")
    with closing(opened[0]):
        engine.host._tiers._timeout_s = TIER_TIMEOUT_S
        conversations = Conversations(engine)

        def metric(name):
            return engine.host.metrics()[f"kv_offload_{name}"]

        for _ in range(3):
            conversations.turn()
            assert engine.host.drain()
        promoted = metric("promoted_blocks")
        assert promoted > 0 and metric("tier_errors") == 0
        conversations.turn(master.kill)  # with reads and writes in flight
        promoted = metric("promoted_blocks")
        conversations.turn()
        assert metric("promoted_blocks") == promoted
        conversations.turn(master.start)
        deadline = time.monotonic() + TIMEOUT_S
        while metric("promoted_blocks") == promoted:  # until the client has connected
            assert time.monotonic() < deadline
            conversations.again()
            engine.host.drain()
