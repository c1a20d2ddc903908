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
    "seconds, on_idle_device, syncs",
    [
        (0.004, False, [1, 1, 5, 5, 5]),
        (0.004, True, [1] * 17),
        (1.0, False, [1, 1, 1]),
        (1.0, True, [1, 1, 1]),
    ],
    ids=["chains", "on an idle device", "long", "long, on an idle device"],
)
def test_steps_between_host_syncs(monkeypatch, seconds, on_idle_device, syncs):
    """Two warm-ups, then samples: of 20 ms, or one of a step that is many times as long."""
    state, clock = State(), itertools.count(step=seconds)
    seconds_per_step: Any = measurement.seconds_per_step
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: next(clock))
    _, last = seconds_per_step(
        State.step, state, seconds_of_sample=0.02, samples=3, on_idle_device=on_idle_device
    )
    assert last is state and state.synced == syncs
