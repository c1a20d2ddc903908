"""`bench.checks.soak` and `tests.fuzz`: what counts as growth or failure, and the records."""

import json

import jax
import numpy as np
import pytest

from bench.checks import soak
from bench.harness.records import Results, Row
from tests.fuzz import __main__ as fuzz


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("samples", "want"),
    [
        ([5.0] * 120, 0),
        ([*range(24), *[24.0] * 96], 0),  # in the warm-up
        ([10 + 0.5 * i for i in range(101)], 40),  # from sample 20 to the last
        ([10.0 + (i == 70) * 900 for i in range(120)], 0),  # an outlier
        ([1.0], 0),
    ],
)
def test_growth(samples, want):
    assert soak.growth(samples) == pytest.approx(want)


FLAT = dict.fromkeys(soak.LIMITS, 0.0)


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, None),
        ({"failures": 1}, "wrong calls"),
        ({"growth": FLAT | {"descriptors": 1.0}}, "growth of descriptors in a segment"),
        ({"growth": FLAT | {"resident memory": 17.0}}, "growth of resident memory in a segment"),
    ],
)
def test_segments_of_one_commit_add_up(tmp_path, change, missed):
    rows: list[Row] = []
    for minutes in (9, 9, 12):
        results = Results("soak")
        segment = soak.Segment(minutes, 100, 0, FLAT)
        segment = segment._replace(**(change if minutes == 9 else {}))
        assert soak.record(results, rows, segment) == (missed is None)
        path = tmp_path / "soak.json"
        path.write_text(json.dumps({**results.to_json(), "commit": "abc"}))
        assert soak.earlier(path, "other") == soak.earlier(path, None) == []
        rows = soak.earlier(path, "abc")
    met = {check.name: check.met for check in results.checks}
    assert met.pop("length of all segments")  # 30 minutes
    assert [name for name, value in met.items() if not value] == ([missed] if missed else [])


@pytest.mark.parametrize("name", ["pools", "errors"])
def test_activities_run(name):
    running = soak.ACTIVITIES[name](np.random.default_rng(0))
    for _ in range(3):
        next(running)


@pytest.mark.parametrize("name", ["load", "swap", "recurrent"])
def test_operations_are_compared(name, monkeypatch):
    assert fuzz.fuzz(name, 3, 0)[:2] == (3, 0)
    real = np.asarray

    def one_bit_is_wrong(array, *arguments, **options):
        found = real(array, *arguments, **options)
        if isinstance(array, jax.Array) and found.nbytes > 64:
            found = found.copy()
            found.reshape(-1).view(np.uint8)[3] ^= 1
        return found

    monkeypatch.setattr(np, "asarray", one_bit_is_wrong)
    assert fuzz.fuzz(name, 1, 0)[:2] == (1, 1)


@pytest.mark.host_only
def test_failures_are_counted_and_sequences_begin_anew(monkeypatch, capsys):
    def third_fails(rng):
        for _ in range(2):
            yield
        raise AssertionError("wrong")

    monkeypatch.setitem(fuzz.OPERATIONS, "load", third_fails)
    assert fuzz.fuzz("load", 7, 5)[:2] == (7, 2)
    assert "load: case 2 of seed [5, 1]" in capsys.readouterr().out
    counts = {"load": fuzz.Count(7, 2, 0.0), "all_reduce": fuzz.Count(0, 0, 0.0)}
    assert [check.met for check in fuzz.record(counts, 5).checks] == [False, False]
    counts = {"load": fuzz.Count(fuzz.ON_A_GPU, 0, 0.0), "all_reduce": fuzz.Count(0, 0, 0.0)}
    assert [check.met for check in fuzz.record(counts, 5).checks] == [True, True]
