"""`bench.harness.processes`: answers and failures of the processes of a measurement."""

import json
import time
import types

import pytest

from bench.harness import processes

pytestmark = pytest.mark.end_to_end

PROGRAM = "tests.util.child_program"


def test_run_returns_printed_objects_of_all_programs():
    lines = [json.dumps({"a": 1}), "some library's word", "[3]", json.dumps({"a": 2}), '{"a":']
    ran = processes.run(PROGRAM, [{"prints": lines}, {"prints": lines[:1]}], timeout_s=30)
    assert ran == ([[{"a": 1}, {"a": 2}], [{"a": 1}]], None)


def test_run_with_a_hanging_program_kills_it_and_keeps_its_output(monkeypatch, tmp_path):
    printed = tmp_path / "printed"
    # The timeout passes once the program has printed, however slowly it starts.
    clock = types.SimpleNamespace(
        sleep=time.sleep, monotonic=lambda: printed.exists() * time.monotonic()
    )
    monkeypatch.setattr(processes, "time", clock)
    request = {"prints": ['{"a": 1}'], "touches": str(printed), "sleeps": 60}
    start = time.monotonic()
    ran = processes.run(PROGRAM, [request], timeout_s=2)
    assert time.monotonic() - start < 30
    assert ran.answers == [[{"a": 1}]]
    assert ran.failure and ran.failure.startswith("not done after 2 s")


def test_run_with_a_failing_program_kills_the_others_and_returns_the_reason(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    start = time.monotonic()
    ran = processes.run(PROGRAM, [{"sleeps": 60}, {"raises": "no baseline"}], timeout_s=60)
    assert time.monotonic() - start < 30
    assert ran.failure == "exit code 1: RuntimeError: no baseline"


def test_run_disables_multicast_in_all_programs(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("JAXKV_MULTICAST", "1")
    seen = {}

    def start(command, variables, output):
        seen.update(variables)
        raise StopIteration

    monkeypatch.setattr(processes, "_start", start)
    with pytest.raises(StopIteration):
        processes.run(PROGRAM, [{}], timeout_s=1, environment={"XLA_FLAGS": "--a"})
    assert seen["NCCL_NVLS_ENABLE"] == seen["JAXKV_MULTICAST"] == "0" and seen["XLA_FLAGS"] == "--a"
