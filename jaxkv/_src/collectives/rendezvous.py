"""Steps that several processes take together: all succeed, or all raise the same error.

What a process has to say travels through the key-value store of `jax.distributed`. A step ends by
one key that is written once, by whoever knows first how it went, so nobody can succeed where
another failed, whoever came too late. (torch's rendezvous and NCCL's bootstrap have no verdict: a
rank that fails leaves its peers to their time-outs.)
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

SUCCESS = "success"

_meetings: collections.Counter[tuple[int, ...]] = collections.Counter()  # by who meets


class Rendezvous:
    """The processes that own something together, and the steps that they take.

    Every process makes its own, in the same order as the others; a process alone exchanges nothing.

    Attributes:
      processes: their `jax.process_index()`, in ascending order.
      timeout_s: how long a process waits for the others in each step, in seconds.
    """

    def __init__(self, processes: Iterable[int], timeout_s: float) -> None:
        self.processes = tuple(sorted(processes))
        self.timeout_s = timeout_s
        self._steps = 0
        if self.alone:
            return
        self._store = _key_value_store()
        _meetings[self.processes] += 1
        names = "_".join(map(str, self.processes))
        self._prefix = f"jaxkv/{names}/{_meetings[self.processes]}"

    @property
    def alone(self) -> bool:
        return len(self.processes) == 1

    def step(self, name: str, work: Callable[[], Any]) -> dict[int, Any]:
        """Runs `work` in every process.

        Args:
          name: of the step, for errors.
          work: returns what JSON can hold.

        Returns:
          By process what `work` returned there.

        Raises:
          RuntimeError: a process failed, or did not come in time: the same text in all processes.
          Exception: whatever `work` raised, in a process alone.
        """
        if self.alone:
            return {self.processes[0]: work()}
        self._steps += 1
        key = f"{self._prefix}/{self._steps}"
        cause = None
        try:
            said = json.dumps({"result": work()})
        except Exception as error:
            cause = error
            said = json.dumps({"error": f"{type(error).__name__}: {error}"})
        self._store.key_value_set(f"{key}/{jax.process_index()}", said)
        heard = self._hear(key)
        verdict = self._agree(key, self._failure(name, heard))
        if verdict != SUCCESS:
            raise RuntimeError(verdict) from cause
        if len(heard) < len(self.processes):
            heard = self._hear(key)  # all came after all, or nobody had seen a success
        return {process: json.loads(text)["result"] for process, text in heard.items()}

    def leave(self) -> list[int]:
        """Says that this process needs the others no more, and waits until they say so too.

        Returns:
          The processes that did not within `timeout_s`, or that can't be asked any more.
        """
        if self.alone:
            return []
        key = f"{self._prefix}/leave"
        try:
            self._store.key_value_set(f"{key}/{jax.process_index()}", SUCCESS)
            heard = self._hear(key)
        except jax.errors.JaxRuntimeError:  # the coordinator is gone
            heard = {jax.process_index(): SUCCESS}
        return [process for process in self.processes if process not in heard]

    def _hear(self, key: str) -> dict[int, str]:
        """What the processes wrote, by process; without those whose time was over."""
        deadline = time.monotonic() + self.timeout_s
        heard = {}
        for process in self.processes:
            left_ms = max(1, int((deadline - time.monotonic()) * 1e3))
            try:
                heard[process] = self._store.blocking_key_value_get(f"{key}/{process}", left_ms)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        return heard

    def _agree(self, key: str, verdict: str) -> str:
        """The verdict of the process that was the first to give one."""
        try:
            self._store.key_value_set(f"{key}/verdict", verdict)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        return self._store.blocking_key_value_get(f"{key}/verdict", 1 + int(self.timeout_s * 1e3))

    def _failure(self, step: str, heard: dict[int, str]) -> str:
        """What went wrong by what the processes wrote, or `SUCCESS`."""
        failures = []
        for process in self.processes:
            if process not in heard:
                failures.append(f"process {process} did not come within {self.timeout_s:g} s")
            elif error := json.loads(heard[process]).get("error"):
                failures.append(f"process {process} failed: {error}")
        return f"{step}: {'; '.join(failures)}" if failures else SUCCESS


def _key_value_store() -> Any:
    # Private, but the one way between processes that needs no collective.
    from jax._src.distributed import global_state

    if global_state.client is None:
        raise RuntimeError(
            "the mesh has devices of several processes, which meet by way of jax.distributed: "
            "call jax.distributed.initialize() first"
        )
    return global_state.client
