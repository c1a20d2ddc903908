"""Rendezvous of several processes: each step succeeds in all of them or raises the same error.

Processes exchange results through the key-value store of `jax.distributed`. The outcome of a step
is a write-once key, set by the first process that knows it. A step therefore cannot succeed in one
process and fail in another, even if some are late. (PyTorch's rendezvous and NCCL's bootstrap have
no such consensus: if a rank fails, its peers run into their timeouts.)
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

SUCCESS = "success"
SLICE_S = 0.2  # the longest wait without a check for signals

_instances: collections.Counter[tuple[int, ...]] = collections.Counter()  # by process group


class Rendezvous:
    """A group of processes that share a resource, and their collective steps.

    Every process creates its own instance, in the same order as the others. A single process
    exchanges nothing.

    Attributes:
      processes: `jax.process_index()` of each process, in ascending order.
      timeout_s: limit of the wait for the other processes in each step, in seconds.
    """

    def __init__(self, processes: Iterable[int], timeout_s: float) -> None:
        self.processes = tuple(sorted(processes))
        self.timeout_s = timeout_s
        self._steps = 0
        if self.is_single_process:
            return
        self._store = _key_value_store()
        _instances[self.processes] += 1
        names = "_".join(map(str, self.processes))
        self._prefix = f"jaxkv/{names}/{_instances[self.processes]}"

    @property
    def is_single_process(self) -> bool:
        return len(self.processes) == 1

    def step(self, name: str, work: Callable[[], T]) -> dict[int, T]:
        """Runs `work` in every process.

        Args:
          name: name of the step, for error messages.
          work: function with a JSON-serializable result.

        Returns:
          The result of `work` in each process, by process index.

        Raises:
          RuntimeError: a process failed or timed out; the text is the same in all processes.
          Exception: for a single process, the exception of `work`.
        """
        if self.is_single_process:
            return {self.processes[0]: work()}
        self._steps += 1
        key = f"{self._prefix}/{self._steps}"
        cause = None
        try:
            entry = json.dumps({"result": work()})
        except Exception as error:
            cause = error
            entry = json.dumps({"error": f"{type(error).__name__}: {error}"})
        self._store.key_value_set(f"{key}/{jax.process_index()}", entry)
        entries = self._read_entries(key)
        outcome = self._decide(key, self._failure(name, entries))
        if outcome != SUCCESS:
            raise RuntimeError(outcome) from cause
        if len(entries) < len(self.processes):
            entries = self._read_entries(key)  # entries missed by the timeout: on success all exist
        return {process: json.loads(text)["result"] for process, text in entries.items()}

    def leave(self) -> list[int]:
        """Signals that this process no longer needs the others, and waits for their signals.

        Returns:
          The processes that did not signal within `timeout_s` or are no longer reachable.
        """
        if self.is_single_process:
            return []
        key = f"{self._prefix}/leave"
        try:
            self._store.key_value_set(f"{key}/{jax.process_index()}", SUCCESS)
            entries = self._read_entries(key)
        except jax.errors.JaxRuntimeError:  # the coordinator has shut down
            entries = {jax.process_index(): SUCCESS}
        return [process for process in self.processes if process not in entries]

    def _read_entries(self, key: str) -> dict[int, str]:
        """Entries of the processes, by process index, except for those that timed out."""
        deadline = time.monotonic() + self.timeout_s
        entries = {}
        for process in self.processes:
            if (entry := self._read(f"{key}/{process}", deadline)) is not None:
                entries[process] = entry
        return entries

    def _read(self, key: str, deadline: float) -> str | None:
        """The value of a key, or None if it does not exist by the deadline.

        In slices: Python handles no signal during a read.
        """
        while True:
            left_s = deadline - time.monotonic()
            wait_ms = max(1, int(min(left_s, SLICE_S) * 1e3))
            try:
                return self._store.blocking_key_value_get(key, wait_ms)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if left_s <= SLICE_S:
                return None

    def _decide(self, key: str, outcome: str) -> str:
        """The outcome of the first process that wrote one."""
        try:
            self._store.key_value_set(f"{key}/outcome", outcome)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        if (decided := self._read(f"{key}/outcome", time.monotonic() + self.timeout_s)) is None:
            raise RuntimeError(f"no result of {key} after {self.timeout_s:g} s")
        return decided

    def _failure(self, step: str, entries: dict[int, str]) -> str:
        """Failures found in the entries of the processes, or `SUCCESS`."""
        failures = []
        for process in self.processes:
            if process not in entries:
                failures.append(
                    f"timed out after {self.timeout_s:g} s waiting for process {process}"
                )
            elif error := json.loads(entries[process]).get("error"):
                failures.append(f"process {process} failed: {error}")
        return f"{step}: {'; '.join(failures)}" if failures else SUCCESS


def _key_value_store() -> Any:
    # Private API, but the only channel between processes that needs no collective.
    from jax._src.distributed import global_state

    if global_state.client is None:
        raise RuntimeError(
            "SymmetricMemory.create: a mesh over several processes requires jax.distributed; "
            "call jax.distributed.initialize() first"
        )
    return global_state.client
