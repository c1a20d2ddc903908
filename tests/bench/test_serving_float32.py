"""`bench.serving.compare`: equal tokens in float32, of which all records have checks."""

import argparse
import threading

import jax
import pytest

from bench.harness.records import Results
from bench.serving import cases, runs
from bench.serving.systems import DEVICE_PUT, IN_HBM, JAXKV, NAMES


def flags(*parts, tiny=False, system=None):
    return argparse.Namespace(tiny=tiny, quick=False, part=[*parts] or None, system=system)


@pytest.mark.host_only
def test_all_systems_and_workloads_are_checked_in_float32():
    *figures, checks = cases.compare(flags())
    assert {case.dtype for case in figures} == {"bfloat16"}
    assert not any(case.checks_only for case in figures)
    assert (checks.dtype, checks.checks_only, checks.systems) == ("float32", True, NAMES)
    assert not checks.profiled
    assert checks.workloads.keys() == figures[0].workloads.keys()
    assert cases.compare(flags("random"))[-1].dtype == "bfloat16"
    (alone,) = cases.compare(flags("float32"))
    assert (alone.label, alone.checks_only) == (checks.label, True)
    (tiny,) = cases.compare(flags("float32", tiny=True))  # also of figures
    assert tiny.workloads.keys() == checks.workloads.keys() and not tiny.checks_only


@pytest.mark.host_only
def test_the_part_in_float32_has_checks_only():
    (case,) = cases.compare(flags("float32"))
    sample = {runs.RATE: ("1/s", 1.0)}
    taken = {"random": {name: [sample] for name in (IN_HBM, DEVICE_PUT, JAXKV)}}
    answers = {"random": {IN_HBM: [[1], [2]], DEVICE_PUT: [[1], [2]], JAXKV: [[1], [3]]}}
    results = Results("x")
    runs.record(results, case, taken, answers)
    assert not results.rows and not results.targets
    assert [(check.name, check.got, check.met) for check in results.checks] == [
        ("float32, random, pages of 8: tokens of device_put as in HBM", 0, True),
        ("float32, random, pages of 8: tokens of jaxkv as in HBM", 1, False),
    ]


@pytest.mark.host_only
def test_products_are_full_in_float32_in_all_threads():
    found = []

    def note():
        found.append(getattr(jax.config, runs.PRECISION))

    note()
    for dtype in ("float32", "bfloat16"):
        with runs.full_products(dtype):
            thread = threading.Thread(target=note)
            thread.start()
            thread.join()
    note()
    before = found[0]
    assert found == [before, "highest", before, before]
