"""Measurement programs in separate processes, so that a hang costs seconds instead of the run.

A program prints a line of JSON for each measurement immediately: results before a failure count.
"""

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.harness.records import REPOSITORY

GRACE_SECONDS = 5.0  # for the remaining processes, after one has failed
POLL_SECONDS = 0.05
# Where GPUs are shared between machines, benchmarks must not use multicast.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "JAXKV_MULTICAST": "0",
}


class ProcessResult(NamedTuple):
    """Output of programs that ran together.

    Attributes:
      answers: printed objects of each program.
      failure: why not all completed, or None.
    """

    answers: list[list[dict[str, Any]]]
    failure: str | None


def run(
    module: str,
    requests: Sequence[dict[str, Any]],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> ProcessResult:
    """Runs `python -m module REQUEST` for all requests concurrently.

    Args:
      module: the program; its argument is the request as JSON.
      requests: one for each process.
      timeout_s: limit in seconds, after which the processes are killed.
      environment: variables in addition to those of this process.
    """
    variables = {**os.environ, **NO_MULTICAST, **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder, f"{rank}.out") for rank in range(len(requests))]
        started = [
            _start([sys.executable, "-m", module, json.dumps(request)], variables, output)
            for request, output in zip(requests, outputs, strict=True)
        ]
        failure = _wait(started, timeout_s)
        if failure is None:
            return ProcessResult([_answers(output) for output in outputs], None)
        errors = [line for output in outputs for line in _errors(output)]
        return ProcessResult(
            [_answers(output) for output in outputs], ": ".join([failure, *errors[-1:]])
        )


# Below those of connections, which could take a port before the program that is given it; in an
# order that no other process has.
_ports = iter(random.SystemRandom().sample(range(20_000, 32_000), 12_000))


def free_port() -> int:
    """An unused TCP port of this host, another one in each call."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def _start(
    command: list[str], variables: Mapping[str, str], output: pathlib.Path
) -> subprocess.Popen:
    with output.open("w") as out, output.with_suffix(".err").open("w") as err:
        return subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=out, stderr=err)


def _wait(started: list[subprocess.Popen], timeout_s: float) -> str | None:
    """Waits for all processes and leaves none; the reason if one was killed or failed."""
    failure = None
    end = time.monotonic() + timeout_s
    while None in (codes := [process.poll() for process in started]):
        if any(codes) and not failure:
            failure = f"exit code {next(filter(None, codes))}"
            end = min(end, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > end:
            failure = failure or f"not done after {timeout_s:g} s"
            break
        time.sleep(POLL_SECONDS)
    for process in started:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the driver
            process.wait(GRACE_SECONDS)
    codes = [process.returncode for process in started]
    return failure or next((f"exit code {code}" for code in codes if code), None)


def _answers(output: pathlib.Path) -> list[dict[str, Any]]:
    answers = []
    for line in output.read_text(errors="replace").splitlines():
        try:
            answer = json.loads(line)
        except ValueError:  # other output of a library, or half a line
            continue
        if isinstance(answer, dict):
            answers.append(answer)
    return answers


def _errors(output: pathlib.Path) -> list[str]:
    """Lines likely to contain the error, the best guess last."""
    text = output.with_suffix(".err").read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [line for line in lines if "Error" in line or "Unknown flag" in line] or lines[-1:]
