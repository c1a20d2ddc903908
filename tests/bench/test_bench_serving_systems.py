"""The systems that the serving benchmarks compare."""

import argparse

import numpy as np
import pytest

import jaxkv
from bench.serving import cases, runs, systems, workloads
from bench.serving.systems import (
    COPY_ENGINE,
    DEVICE_PUT,
    HOST_METADATA,
    IN_HBM,
    JAXKV,
    NAMES,
    Memory,
)
from examples.serving.engine import Limits
from examples.serving.model import Config
from examples.serving.presets import init_params

CONFIG = Config(256, 64, 96, 1, 4, 2, 16)
ALL = (*NAMES, HOST_METADATA)


def conversations():
    return workloads.multi_turn(5, 3, 21, 21, 3, parallel=2, vocab=256)


def create(name):
    """An engine for these; few HBM pages, unless all are in HBM."""
    params = init_params(CONFIG, 0, "float32")
    limits = Limits(4, 2, 18, pages_per_request=18, copy_pages=4)
    return systems.create(name, CONFIG, params, limits, Memory(95, 36, 95))


@pytest.mark.cpu_only
@pytest.mark.end_to_end
def test_steps_of_device_put_copy_twice_as_many_pages():
    sizes = {name: create(name).limits.copy_pages for name in (DEVICE_PUT, COPY_ENGINE, JAXKV)}
    assert sizes == {DEVICE_PUT: 8, COPY_ENGINE: 4, JAXKV: 4}


@pytest.mark.cpu_only
@pytest.mark.end_to_end
def test_all_systems_give_the_same_tokens_from_different_places():
    """Few HBM pages: a reload of wrong pages changes the answers."""
    answers, loaded = {}, {}
    for name in ALL:
        engine = create(name)
        (served,) = conversations().run(engine)
        answers[name] = sorted(request.tokens for request in served.requests)
        found = runs.figures(engine, served)
        loaded[name] = found["loaded"][1] > 0
        assert found[runs.RATE][1] > 0 and found["host time per step"][1] > 0
        engine.release()
    assert all(tokens == answers[IN_HBM] for tokens in answers.values())
    assert loaded == {name: name in NAMES[2:] for name in ALL}
    assert len(answers[IN_HBM]) == 15


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        ([], [], (0, 0)),
        ([3], [0], (1, 1)),
        ([3, 4, 5], [0, 1, 2], (3, 1)),
        ([3, 4, 5, 9], [0, 1, 5, 6], (4, 3)),  # a break on each side alone
        ([3, 4, 9], [0, 1, 7], (3, 2)),  # a break on both at once
        ([5, 4, 3], [2, 1, 0], (3, 3)),
    ],
)
def test_extents_are_consecutive_on_both_sides(host, device, expected):
    batch = jaxkv.CopyBatch("load", np.array([*host, -1, -1]), np.array([*device, -1, -1]))
    assert systems.count_extents(batch) == expected


@pytest.mark.cpu_only
@pytest.mark.parametrize("system", [JAXKV, COPY_ENGINE])
def test_only_the_copy_engine_system_has_a_descriptor_for_each_page(system):
    flags = argparse.Namespace(tiny=True, quick=False, part=["multi_turn"], system=None)
    (case,) = cases.compare(flags)
    taken, _ = runs.serve(case._replace(systems=(system,)), 1)
    samples = [sample for workload in taken.values() for sample in workload.get(system, ())]
    pages = [sample["consecutive pages"][1] for sample in samples]
    assert all(count == 1 if system == COPY_ENGINE else count > 1 for count in pages)


class Zeros(dict):
    def __init__(self, engine):
        self.shape = (2 * CONFIG.num_hidden_layers, *engine.spec.block_shape)

    def __getitem__(self, page):
        return np.zeros(self.shape, np.float32)


@pytest.mark.cpu_only
def test_wrong_pages_of_the_device_put_system_are_noticed():
    """The comparison can fail: pages of zeros, loaded instead of those stored."""
    answers = []
    for wrong in (False, True):
        engine = create(DEVICE_PUT)
        if wrong:
            vars(engine)["_stored"] = Zeros(engine)
        (served,) = conversations().run(engine)
        answers.append(sorted(request.tokens for request in served.requests))
        engine.release()
    assert answers[0] != answers[1]
