"""The example engine in several processes; run by rank_process.py."""

from typing import Any
from unittest import mock

import jax
import numpy as np

import jaxkv
from examples.serving.engine import Engine, Limits
from examples.serving.model import Config
from examples.serving.presets import init_params
from examples.serving.request import Request
from jaxkv._src.offload import step_result
from tests.util.process_checks import create, mesh_of

CONFIG = Config(256, 64, 96, 1, 4, 2, 16)
NUM_TURNS, QUESTION, NEW_TOKENS = 3, 17, 4
NUM_HBM_PAGES, NUM_HOST_PAGES = 30, 80  # of 4 tokens; the last turns have 64 pages


def conversations_of_ranks(order: list[int]) -> tuple[list[Any], int]:
    jax.config.update("jax_disable_most_optimizations", True)  # as in the tests: faster to compile
    waits = mock.patch.object(step_result, "is_over", _is_over_now)
    with waits, create(mesh_of(order), max_bytes=1 << 16) as memory:
        return conversations(memory)


def _is_over_now(result: step_result.StepResult) -> bool:
    """Waits, as the time at which a step ends must not decide what the scheduler of a rank does."""
    with jaxkv.allow_host_sync("copies end in the same step on all ranks"):
        result.block_until_ready()
    return True


def conversations(memory: jaxkv.SymmetricMemory | None = None) -> tuple[list[Any], int]:
    """Answers of all turns, and the number of pages loaded; HBM holds half of the conversations."""
    limits = Limits(4, batch=2, token_budget=24, pages_per_request=16, copy_pages=16)
    params = init_params(CONFIG, 1, "float32")
    engine = Engine(CONFIG, params, limits, NUM_HBM_PAGES, NUM_HOST_PAGES, memory=memory)
    rng, histories = np.random.default_rng(5), [list[int]() for _ in range(4)]
    answers, loaded = list[Any](), 0
    for _ in range(NUM_TURNS):
        turn = [Request(h + rng.integers(0, 256, QUESTION).tolist(), NEW_TOKENS) for h in histories]
        for request in turn:
            engine.submit(request)
        while engine.busy:
            engine.step()
        histories = [request.tokens for request in turn]
        answers.append([request.answer for request in turn])
        loaded += sum(r.first_placement.loaded for r in turn if r.first_placement)
    jaxkv.check_errors(engine.state)
    return answers, loaded
