"""Timing by the host's clock, with a simulated clock."""

import types

import pytest

from bench.harness import timing

pytestmark = pytest.mark.host_only


@pytest.fixture
def step(monkeypatch):
    """Makes steps of the given durations; a wait takes as long as its argument, and returns 50."""
    passed: list[int] = []

    def advance(seconds, state):
        passed.append(seconds)
        return state

    clock = types.SimpleNamespace(perf_counter=lambda: sum(passed))
    wait = types.SimpleNamespace(block_until_ready=lambda state: advance(state, 50))
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "jax", wait)
    return lambda seconds: lambda state: advance(next(seconds), state + 4)


def test_seconds_per_call_is_the_median_chain_divided_by_its_calls(step):
    seconds = iter([99, 99, 99, 99, 1, 3, 2, 20, 20, 40])  # two warm-up chains, then three
    got = timing.seconds_per_call(step(seconds), 50, calls=2, repeats=3)
    assert got == ((2 + 20 + 58) / 2, 50) and not [*seconds]


def test_single_call_is_timed_on_an_idle_device(step):
    seconds = iter([1, 99, 30, 99, 3, 99])
    got = timing.single_call(step(seconds), 50, repeats=3, after=lambda: step(seconds)(0))
    assert got == (timing.Call(3, 57), 50) and not [*seconds]


@pytest.mark.parametrize("seconds, calls", [(9.0, 1), (0.12, 1), (0.03, 4), (1e-6, 100)])
def test_chain_length_is_the_shortest_accurate_one(seconds, calls):
    assert timing.chain_length(seconds) == calls


def test_ratio_is_the_median_of_the_ratios_of_rounds():
    ratio, error = timing.ratio([2.0, 4.0, 9.0, 40.0], [1.0, 1.0, 3.0, 4.0])
    assert (ratio, error) == pytest.approx((3.5, 1.2533 * 1.4826 * 1.0 / 2))  # of 2, 4, 3, 10
