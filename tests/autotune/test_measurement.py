import itertools
from typing import Any

import pytest

from jaxkv._src.autotune import measurement


class State:
    """Counts the steps between host syncs."""

    def __init__(self):
        self.steps, self.synced = 0, []

    def step(self):
        self.steps += 1
        return self

    def block_until_ready(self):
        self.synced.append(self.steps)
        self.steps = 0


@pytest.mark.parametrize(
    "seconds, syncs", [(0.004, [1, 1, 5, 5, 5]), (1.0, [1, 1, 1])], ids=["chains", "long"]
)
def test_steps_between_host_syncs(monkeypatch, seconds, syncs):
    """Two warm-ups, then chains of 20 ms, or one step that takes many times as long."""
    state, clock = State(), itertools.count(step=seconds)
    seconds_per_step: Any = measurement.seconds_per_step
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: next(clock))
    _, last = seconds_per_step(State.step, state, seconds_of_sample=0.02, samples=3)
    assert last is state and state.synced == syncs
