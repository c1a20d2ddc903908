"""`SymmetricMemory` over several processes.

The checks of each process are in process_checks.py and thread_checks.py.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import pytest

from bench.harness.processes import free_port

pytestmark = pytest.mark.multigpu

ROOT = pathlib.Path(__file__).parent.parent.parent
TIMEOUT_S = 600  # of all processes; their work takes seconds

ONE_EACH = {world_size: [[device] for device in range(world_size)] for world_size in (2, 4, 8)}
TWO_EACH = [[0, 1], [2, 3]]
MIXED = [[0], [1, 2, 3], [4, 5], [6, 7]]


class Ended(NamedTuple):
    code: int
    result: Any
    output: str


def run(
    folder: pathlib.Path, check: str, devices: list[list[int]], order: list[int] | None = None
) -> list[Ended]:
    """Runs a check in processes with these devices each, and a mesh of the devices in `order`."""
    platform, world_size = jax.default_backend(), sum(map(len, devices))
    if platform == "gpu" and jax.device_count() < world_size:
        pytest.skip(f"needs {world_size} devices, has {jax.device_count()}")
    coordinator = f"127.0.0.1:{free_port()}"
    common = {"platform": platform, "coordinator": coordinator, "processes": len(devices)}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    outputs = [folder / f"process_{process}.txt" for process in range(len(devices))]
    children: list[subprocess.Popen] = []
    with ExitStack() as stack:
        for process, local_devices in enumerate(devices):
            setup = common | {"process": process, "local_devices": local_devices}
            setup |= {"order": order or list(range(world_size))}
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.util.rank_process", json.dumps(setup), check],
                stdin=subprocess.PIPE,
                stdout=stack.enter_context(outputs[process].open("w")),
                stderr=subprocess.STDOUT,
                env=environment,
            )
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        for child in (*children[1:], children[0]):  # the first one waits for the end of its input
            child.communicate(timeout=TIMEOUT_S)
    return [
        ended(child.returncode, output) for child, output in zip(children, outputs, strict=True)
    ]


def ended(code: int, output: pathlib.Path) -> Ended:
    text = output.read_text()
    return Ended(code, json.loads(text.splitlines()[-1]) if code == 0 else None, text)


def results_of_all(*arguments: Any) -> list[Any]:
    all_ended = run(*arguments)
    for process, end in enumerate(all_ended):
        assert end.code == 0, f"process {process}:\n{end.output}"
    return [end.result for end in all_ended]


@pytest.mark.parametrize(
    "devices, order",
    [
        (ONE_EACH[2], [1, 0]),
        (ONE_EACH[4], [2, 0, 3, 1]),
        (TWO_EACH, [3, 0, 2, 1]),
        pytest.param(ONE_EACH[8], [5, 2, 7, 0, 1, 6, 3, 4], marks=pytest.mark.gpu),
        pytest.param(MIXED, [7, 4, 1, 6, 0, 3, 5, 2], marks=pytest.mark.gpu),
    ],
    ids=["2x1", "4x1", "2x2", "8x1", "1+3+2+2"],
)
def test_sums_are_exact(tmp_path, devices, order):
    results_of_all(tmp_path, "sums_are_exact", devices, order)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 3, 1]], ids=str)
def test_groups_are_independent(tmp_path, order):
    results_of_all(tmp_path, "groups_are_independent", TWO_EACH, order)


def test_short_soak(tmp_path):
    counts = results_of_all(tmp_path, "short_soak", TWO_EACH, [1, 3, 0, 2])
    assert counts[0] == counts[1] > 20


@pytest.mark.parametrize("world_size", [2, 4])
def test_creation_failure_raises_in_all_processes(tmp_path, world_size):
    first, *others = results_of_all(
        tmp_path, "creation_failure_raises_in_all_processes", ONE_EACH[world_size]
    )
    assert all(errors == first for errors in others)
    last, create = world_size - 1, "SymmetricMemory.create"
    for error, expected in zip(
        first,
        [
            f"{create}, allocation: process {last} failed: RuntimeError: create_communicator was",
            f"{create}, allocation: process {last} failed: RuntimeError: communicator_handles was",
            f"{create}, mapping: process {last} failed: RuntimeError: map_communicator was",
            f"{create}: arguments must be equal in all processes, but max_bytes is 1024 in "
            "process 0 and 2048 in process 1",
            f"{create}: arguments must be equal in all processes, but tuning table "
            "(JAXKV_TUNING_ALL_REDUCE) is",
            f"{create}, arguments: process {last} failed: ValueError: max_bytes must be",
            f"{create}, arguments: process {last} failed: ValueError: timeout_s must be",
            f"{create}, arguments: process {last} failed: ValueError: axis_name must be",
            f"{create}, arguments: timed out after 10 s waiting for process {last}",
        ],
        strict=True,
    ):
        assert error.startswith(expected)


def test_processes_launch_equal_numbers_of_blocks(tmp_path):
    results_of_all(tmp_path, "block_limits_are_equal", ONE_EACH[2])


def test_creation_can_be_interrupted(tmp_path):
    """By Ctrl-C, while it waits for a process that does not come."""
    results_of_all(tmp_path, "creation_can_be_interrupted", [[0]])


def test_timeout_aborts_all_ranks(tmp_path):
    """A rank that times out notifies the others, so that none waits for another full timeout."""
    results_of_all(tmp_path, "timeout_aborts_all_ranks", TWO_EACH, [2, 3, 0, 1])


def test_unordered_threads_get_correct_results_or_errors(tmp_path):
    """Their programs may reach the ranks in different orders."""
    results = results_of_all(tmp_path, "unordered_threads", ONE_EACH[2])
    for counts in results:
        for name, count in counts.items():
            assert count.get("correct", 0) + count.get("rejected", 0) == 2000, (name, count)
            assert count.get("rejected", 0) > 0, "no negative control: all calls were in one order"


def test_ordered_threads_get_correct_results(tmp_path):
    for counts in results_of_all(tmp_path, "ordered_threads", ONE_EACH[2]):
        assert all(count == {"correct": 2000} for count in counts.values()), counts


def test_threads_with_their_own_memory_get_correct_results_or_timeouts(tmp_path):
    """On GPUs, which run programs one after the other, the orders of the ranks may differ."""
    for counts in results_of_all(tmp_path, "threads_with_own_memory", ONE_EACH[2]):
        ends = counts["operands"]
        timeouts = sum(count for end, count in ends.items() if "PeerTimeoutError" in end)
        assert ends["correct"] + timeouts == 2000, ends
        assert jax.default_backend() == "gpu" or timeouts == 0, ends


def test_signatures_are_equal_in_all_processes(tmp_path):
    first, second = results_of_all(tmp_path, "signatures", TWO_EACH)
    assert first == second
    every = [signature for program in first for signature in program]
    assert all(every) and len(set(every)) == len(every) > len(first)


def test_close_waits_for_other_processes(tmp_path):
    times = results_of_all(tmp_path, "close_waits_for_other_processes", ONE_EACH[2])
    assert min(end for _, end in times) >= max(begin for begin, _ in times)


@pytest.mark.parametrize("world_size", [2, 4])
def test_timeout_names_killed_process(tmp_path, world_size):
    *survivors, killed = run(tmp_path, "killed_process", ONE_EACH[world_size])
    assert killed.code == -signal.SIGKILL
    for end in survivors:
        assert end.code == 0, end.output
        # Also a rank that waited for another survivor.
        assert re.search(rf" for rank {world_size - 1}\b", end.result), end.result


def test_multiprocess_mesh_requires_jax_distributed():
    from jaxkv._src.collectives.rendezvous import Rendezvous

    with pytest.raises(RuntimeError, match=r"call jax\.distributed\.initialize\(\) first"):
        Rendezvous([0, 1], 1.0)
