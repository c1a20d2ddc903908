"""Keeps small arrays in pinned host memory until the programs that use them have run.

XLA's GPU client immediately reuses the pinned host memory of a deleted array, though programs that
read or write the array may have yet to run (docs/internals.md). A kernel would then read the ids of
a later call, or counts would be written over ids. An array is therefore referenced here until
nothing else refers to it and a program that was enqueued after that has run: the programs of a
device run in order.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

PLATFORMS = {"gpu"}  # whose client reuses memory early
FEW = 64  # arrays; one of 64 KiB or more counts as several


class Program(Protocol):
    """A program that was enqueued."""

    def is_ready(self) -> bool:
        """Whether it has run."""


class HeldArrays:
    """Arrays that others refer to, and arrays that only enqueued programs may still use.

    Args:
      enqueue: enqueues a program on each of the devices.
    """

    def __init__(self, enqueue: Callable[[Iterable[jax.Device]], Sequence[Program]]):
        self._enqueue = enqueue
        self._lock = threading.Lock()  # of all but the new arrays
        self._new: deque[jax.Array] = deque()
        self._held: dict[int, jax.Array] = {}  # by id()
        self._weight, self._limit = 0, FEW
        self._leaving: deque[tuple[Sequence[Program], list[jax.Array]]] = deque()

    def hold(self, array: jax.Array) -> None:
        """References the array until nothing else does and all programs given it have run."""
        self._new.append(array)
        # Never blocks. Any Python code may collect garbage, and so run code that holds an array, or
        # that waits for another thread which holds one: the owner of the lock, or the next call,
        # finds the array.
        if not self._lock.acquire(blocking=False):
            return
        try:
            left = self._sort()
        finally:
            self._lock.release()
        del left

    def _sort(self) -> list[Any]:
        """Lets go of arrays that are used by programs only; returns those that were to leave."""
        while self._new:
            new = self._new.popleft()
            self._held[id(new)] = new
            self._weight += _weight(new)
            del new
        if self._weight < self._limit:
            return []
        held, self._held = [*self._held.values()], {}
        try:
            used, unused = _by_use(held)
            devices = {d for one in unused for d in one.sharding.addressable_devices}
            programs = self._enqueue(devices)
        except BaseException:
            self._held = {id(one): one for one in held}
            raise
        self._held = {id(one): one for one in used}
        self._weight = sum(map(_weight, used))
        self._limit = 2 * self._weight + FEW  # a check takes time for each array
        self._leaving.append((programs, unused))
        left = []
        while self._leaving and all(program.is_ready() for program in self._leaving[0][0]):
            left.append(self._leaving.popleft())
        return left


def _weight(array: jax.Array) -> int:
    return 1 + (array.nbytes >> 16)


def _references(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(one) for one in objects]


_OWN_REFERENCES = _references([object()])[0]


def _by_use(arrays: list[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Arrays that others refer to or whose upload is not over, and all others."""
    by_use: tuple[list[jax.Array], list[jax.Array]] = [], []
    for array, number in zip(arrays, _references(arrays), strict=True):
        unused = number == _OWN_REFERENCES and (array.is_deleted() or array.is_ready())
        by_use[unused].append(array)
    return by_use


@functools.cache
def _program(device: jax.Device) -> tuple[Callable[[jax.Array], Any], jax.Array]:
    """A compiled program, and its argument."""
    with jax.ensure_compile_time_eval():
        x = jax.device_put(np.int32(0), device)
        return jax.jit(lambda x: x + 1).lower(x).compile(), x


def _enqueue(devices: Iterable[jax.Device]) -> list[Program]:
    return [run(x) for run, x in map(_program, devices)]


_arrays = HeldArrays(_enqueue)


def hold(array: jax.Array) -> None:
    """`HeldArrays.hold`, for an array of a platform that needs it."""
    devices: set[Any] = array.sharding.addressable_devices
    if next(iter(devices)).platform in PLATFORMS:
        for device in devices:
            _program(device)  # compiled at the first array, not in the middle of a step loop
        _arrays.hold(array)
