"""`python -m jaxkv.tune --all-reduce`: verification before timing; rules from the times."""

import functools
import os
import subprocess
import sys
from unittest import mock

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.autotune import all_reduce, measurement
from jaxkv._src.autotune.all_reduce import Cell
from jaxkv._src.tuning import all_reduce_table as tables

NAMES = ("low_latency", "one_shot", "two_shot", "psum")


@pytest.mark.cpu_only
def test_command_writes_valid_table(tmp_path):
    out = tmp_path / "cpu.json"
    command = [sys.executable, "-m", "jaxkv.tune", "--all-reduce", "--quick", "--out", str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    output = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**environment, "JAXKV_COMMIT": "c0ffee" * 7},
    ).stdout
    table = tables.load(out)
    assert table.how == "python -m jaxkv.tune --all-reduce --quick, on 2 devices"
    assert (table.device_kind, table.commit) == ("cpu", "c0ffee" * 7)
    assert table.date and table.versions["jax"] == jax.__version__
    packaged = tables.packaged_table("cpu")
    assert {n: table.rules[n] for n in (4, 6, 8)} == {n: packaged.rules[n] for n in (4, 6, 8)}
    assert out.read_text() in output and f"{tables.VARIABLE}={out}" in output
    assert "2 devices, 1024 bytes of bfloat16: low_latency " in output


@pytest.mark.cpu_only
def test_command_with_one_device_fails():
    command = [sys.executable, "-m", "jaxkv.tune", "--all-reduce", "--quick"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode and "requires at least 2 devices, found 1" in ran.stderr


@pytest.fixture
def cell():
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    return Cell(2, 1 << 10, "float32")


def test_supported_algorithms_are_measured(cell, monkeypatch):
    monkeypatch.setattr(measurement, "seconds_per_step", lambda step, state: (32.0, state))
    found = all_reduce.measure(cell)
    assert {*found} >= {*NAMES} and {*found.values()} == {1.0}


@pytest.mark.parametrize("dtype", all_reduce.DTYPES)
def test_incorrect_result_raises(cell, dtype, monkeypatch):
    right = jaxkv.all_reduce

    @functools.wraps(right)
    def wrong(memory, x, axis_name, *, implementation):
        summed = right(memory, x, axis_name, implementation=implementation)
        return summed.at[..., -1].add(2) if implementation == "one_shot" else summed

    timed = mock.Mock(return_value=(1.0, None))
    monkeypatch.setattr(jaxkv, "all_reduce", wrong)
    monkeypatch.setattr(measurement, "seconds_per_step", timed)
    with pytest.raises(RuntimeError, match=r"1024 bytes of .*: incorrect result of one_shot"):
        all_reduce.measure(cell._replace(dtype=dtype))
    assert timed.call_count == tables.ALGORITHMS.index("one_shot")


@pytest.mark.parametrize("quick", [False, True])
def test_gpu_cells(quick):
    cells = all_reduce.cells("gpu", 4, quick=quick)
    assert len({*cells}) == len(cells)
    assert {cell.world_size for cell in cells} == {2, 4}
    assert {cell.num_bytes for cell in cells} >= {1 << 10, 1 << 20, 64 << 20}
    assert {cell.dtype for cell in cells} == {*all_reduce.DTYPES[: 1 if quick else 2]}


def always(algorithm, num_bytes):
    return True


def test_slower_dtype_determines_the_algorithm():
    times = {
        1024: [{"low_latency": 1.0, "one_shot": 2.0}, {"low_latency": 1.5, "one_shot": 2.0}],
        # low_latency is fastest for bfloat16 but slower for float32.
        2048: [{"low_latency": 3.0, "one_shot": 2.0}, {"low_latency": 1.0, "one_shot": 2.0}],
    }
    assert all_reduce.rules_of(times, always) == [(0, "low_latency"), (2048, "one_shot")]


def test_equal_times_yield_one_rule():
    times = {1 << i: [{"one_shot": 1.0, "two_shot": 1.0 - 0.02 * (i % 2)}] for i in range(10, 20)}
    assert all_reduce.rules_of(times, always) == [(0, "one_shot")]


def test_noise_does_not_accumulate():
    """A comparison of neighbours would keep psum: it is near one_shot, and one_shot near
    two_shot."""
    times = {
        1024: [{"psum": 1.0}],
        2048: [{"one_shot": 0.92, "two_shot": 0.85, "psum": 1.0}],
    }
    assert all_reduce.rules_of(times, always) == [(0, "psum"), (2048, "one_shot")]


@pytest.mark.parametrize("limit", [1024, 1500, 2046, 2047])
def test_rule_ends_at_exact_size_limit(limit):
    times = {1024: [{"low_latency": 1.0, "one_shot": 2.0}], 2048: [{"one_shot": 2.0}]}
    rules = all_reduce.rules_of(times, lambda name, size: name == "one_shot" or size <= limit)
    assert rules == [(0, "low_latency"), (limit + 1, "one_shot")]


@given(
    st.dictionaries(
        st.integers(0, 30).map(lambda power: 1 << power),
        st.dictionaries(st.sampled_from(NAMES[1:]), st.floats(1e-6, 1e-2)).map(
            lambda found: [{**found, "psum": 1e-3}]
        ),
        min_size=1,
    )
)
def test_rules_are_optimal_up_to_noise(times):
    """Nor an unsupported algorithm, at any measured size."""

    def supports(algorithm, num_bytes):
        # Between measured sizes: as at the next larger one.
        return algorithm in times[min(size for size in times if size >= num_bytes)][0]

    rules = all_reduce.rules_of(times, supports)
    minima = [least for least, _ in rules]
    assert minima[0] == 0 and minima == sorted({*minima})
    for size, [found] in times.items():
        chosen = [name for least, name in rules if least <= size][-1]
        assert found[chosen] <= min(found.values()) / (1 - all_reduce.NOISE) * (1 + 1e-9)


def test_dtype_differences_are_reported():
    here = Cell(2, 1024, "bfloat16")
    other = here._replace(dtype="float32")
    fast, slow = {"one_shot": 1.0, "psum": 2.0}, {"one_shot": 2.0, "psum": 1.0}
    assert all_reduce.differences({here: fast, other: fast}) == []
    assert all_reduce.differences({here: fast, other: {**fast, "psum": 0.99}}) == []
    assert all_reduce.differences({here: fast, other: slow}) == [
        "2 devices, 1024 bytes of float32: psum, and one_shot of bfloat16"
    ]


# --------------------------------------------------------------------------------------------------
# The file


@pytest.mark.parametrize("path", sorted(tables.PACKAGED.glob("*.json")), ids=lambda path: path.name)
def test_table_round_trip(path, tmp_path):
    assert tables.load(path).to_text() == path.read_text()
    assert {*tables.load(path).rules} == {*tables.WORLD_SIZES}


def test_environment_variable_selects_table(tmp_path, monkeypatch):
    packaged = tables.packaged_table("cpu")
    path = tmp_path / "table.json"
    path.write_text(packaged.to_text().replace("low_latency", "two_shot"))
    monkeypatch.setenv(tables.VARIABLE, str(path))
    assert tables.table_for("cpu").algorithm(2, 0) == "two_shot"
    with pytest.raises(ValueError, match=r"for device kind 'cpu', this .* 'Some GPU'"):
        tables.table_for("Some GPU")
    monkeypatch.delenv(tables.VARIABLE)
    assert tables.table_for("cpu") == packaged
