"""Timing by the host's clock, with a simulated clock."""

import functools
import math
import random
import statistics
import types

import pytest

from bench.harness import peak_bandwidth, timing
from bench.harness.records import Results

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
    assert ([*got[0]], got[1]) == ([3, 57], 50) and not [*seconds]


@pytest.mark.parametrize("seconds, calls", [(9.0, 1), (0.12, 1), (0.03, 4), (1e-6, 100)])
def test_chain_length_is_the_shortest_accurate_one(seconds, calls):
    assert timing.chain_length(seconds) == calls


def test_ratio_is_the_median_of_the_ratios_of_rounds():
    ratio = timing.ratio([2.0, 4.0, 9.0, 40.0], [1.0, 1.0, 3.0, 4.0])
    want = timing.median([2, 4, 3, 10])
    assert (ratio, ratio.error) == pytest.approx((3.5, want.error))


@pytest.mark.parametrize(("samples", "t"), [([1, 2, 3], 4.5265), ([1, 2, 3, 4, 5], 2.8693)])
def test_error_of_few_samples_is_of_a_normal_distribution(samples, t):
    error = 1.2533 * statistics.stdev(samples) / len(samples) ** 0.5
    assert timing.median(samples).error == pytest.approx(error * t / 2, rel=1e-4)


# Ends of the interval, from 0, of samples 0, 1, 2...: the largest for which a binomial distribution
# of n tosses has at most 2.275 % up to the lower one.
@pytest.mark.parametrize(
    ("number", "low", "high"),
    [(6, 0, 5), (8, 0, 7), (9, 1, 7), (11, 1, 9), (12, 2, 9), (20, 5, 14), (240, 104, 135)],
)
def test_error_is_half_the_distance_to_an_order_statistic(number, low, high):
    tossed = [sum(math.comb(number, i) for i in range(k + 1)) / 2**number for k in (low, low + 1)]
    assert tossed[0] <= 0.02275 < tossed[1] and low + high == number - 1
    samples = [float(i * i) for i in range(number)]  # the upper end is the farther one
    figure = timing.median(random.Random(0).sample(samples, number))
    assert figure == statistics.median(samples)
    assert figure.error == pytest.approx((high**2 - figure) / 2)
    below = timing.median([-sample for sample in samples])
    assert (below, below.error) == pytest.approx((-figure, figure.error))


@pytest.mark.parametrize("interrupted", [1e6, -1e6])
def test_an_interrupted_sample_does_not_change_the_error(interrupted):
    samples = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
    worse = [interrupted, *samples[1:]] if interrupted < 0 else [*samples[:-1], interrupted]
    figure, same = timing.median(samples), timing.median(worse)
    assert (figure, figure.error) == (same, same.error) == pytest.approx((1.4, 0.15))


@pytest.mark.parametrize("number", [3, 5, 6, 9, 12, 21])
@pytest.mark.parametrize("op", ["<=", ">="])
@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy tails"])
def test_noise_rarely_meets_a_target_at_the_true_value(number, op, heavy):
    rng, found = random.Random(0), Results("x")
    for _ in range(3000):
        tails = [rng.choice([0.1, 0.1, 0.1, 10]) if heavy else 0.1 for _ in range(number)]
        samples = [rng.gauss(1, tail) for tail in tails]
        found.target("t", timing.median(samples), op, 1, "us")
    assert sum(bool(target.met) for target in found.targets) <= 0.03 * 3000


def test_samples_most_of_which_are_equal_have_an_error():
    figure = timing.median([0.99, 0.99, 0.99, 1.5, 1.7])
    assert figure == 0.99 and not Results("x").target("t", figure, "<=", 1, "us").met
    assert timing.median([0.99] * 5).error == pytest.approx(0)


def test_error_of_a_single_sample_is_unknown():
    assert timing.median([2.0]) == 2 and math.isnan(timing.median([2.0]).error)


def test_arithmetic_propagates_errors_of_independent_figures():
    a, b = timing.Figure(8, 0.3), timing.Figure(2, 0.4)
    made = [a + b, a - b, a * b, a / b, 16 / a, a * 10, a / 4, sum([a, b], timing.Figure(0))]
    made += [10 - a, -a]
    found = [(figure, timing.error_of(figure)) for figure in made]
    assert found == [
        (10, pytest.approx(0.5)),
        (6, pytest.approx(0.5)),
        (16, pytest.approx(math.hypot(0.6, 3.2))),
        (4, pytest.approx(math.hypot(0.15, 0.8))),
        (2, pytest.approx(0.075)),
        (80, pytest.approx(3)),
        (2, pytest.approx(0.075)),
        (10, pytest.approx(0.5)),
        (2, 0.3),
        (-8, 0.3),
    ]


def test_rounds_run_every_method_once_in_changing_order():
    ran: list[str] = []

    def run(name):
        ran.append(name)
        return len(ran)

    methods = {name: functools.partial(run, name) for name in "abcd"}
    samples = timing.rounds(methods, 5)
    orders = [ran[i : i + 4] for i in range(0, 20, 4)]
    assert all(sorted(order) == [*"abcd"] for order in orders) and orders.count(orders[0]) < 5
    assert samples == {
        name: [4 * number + order.index(name) + 1 for number, order in enumerate(orders)]
        for name in "abcd"
    }


def test_rounds_go_on_for_the_given_time(step):
    run = step(iter([1, 1, 1, 1]))
    assert timing.rounds({"a": lambda: run(0)}, 2, seconds=3.5) == {"a": [4] * 4}


def test_peak_is_the_best_of_all_measurements(monkeypatch):
    durations = iter([9.0, *[2.0] * peak_bandwidth.REPEATS, *[1.0, 3.0, 3.0, 3.0, 3.0]])
    now = [0.0]
    monkeypatch.setattr(peak_bandwidth.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += next(durations)

    copy = peak_bandwidth._Copy("a copy", run, 4 * 10**9)
    assert copy.rate == 2.0
    copy.measure()
    assert copy.rate == 4.0 and next(durations, None) is None
