"""Programs that measure in processes of their own, so that one that hangs costs seconds, not a run.

A program prints a line of JSON for everything that it measured, at once, so that what came before
its end counts.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.harness.records import REPOSITORY

GRACE_SECONDS = 5.0  # for the others, after one has failed
POLL_SECONDS = 0.05
# Where GPUs are shared between machines, multicast is not a benchmark's to use.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "JAXKV_MULTICAST": "0",
}


class ProcessResult(NamedTuple):
    """What programs that ran together said.

    Attributes:
      answers: for each of them the objects that it printed.
      failure: why not all came to their end, or None.
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
    """Runs `python -m module REQUEST` for each request, all at the same time.

    Args:
      module: the program; its argument is the request as JSON.
      requests: one for each process.
      timeout_s: after so many seconds they are killed.
      environment: variables beside those of this process.
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
        said = [line for output in outputs for line in _errors(output)]
        return ProcessResult(
            [_answers(output) for output in outputs], ": ".join([failure, *said[-1:]])
        )


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(
    command: list[str], variables: Mapping[str, str], output: pathlib.Path
) -> subprocess.Popen:
    with output.open("w") as out, output.with_suffix(".err").open("w") as err:
        return subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=out, stderr=err)


def _wait(started: list[subprocess.Popen], timeout_s: float) -> str | None:
    """Waits for all and leaves none; the reason if one had to be killed or failed."""
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
        except ValueError:  # what else a library prints, or half a line
            continue
        if isinstance(answer, dict):
            answers.append(answer)
    return answers


def _errors(output: pathlib.Path) -> list[str]:
    """Lines that may say why, the last being the best guess."""
    text = output.with_suffix(".err").read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [line for line in lines if "Error" in line or "Unknown flag" in line] or lines[-1:]
