"""Calls of the extension on a communicator release the GIL: the last owner of a communicator waits
for the devices, whose work may wait for a Python callback."""

import sys
import threading
import time
from functools import partial

import pytest

from jaxkv._src.runtime import native
from tests.util.ranks import memory_of

pytestmark = pytest.mark.cpu_only
DEADLINE_S = 20.0


@pytest.fixture
def no_switches():
    """A thread that waits for the GIL gets it only from one that releases it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def lets_others_run(call) -> bool:
    """Whether another thread gets the GIL during repeated calls."""
    gate, ran = threading.Lock(), []
    gate.acquire()

    def wait_and_run():
        with gate:  # waits without the GIL
            ran.append(True)

    other = threading.Thread(target=wait_and_run)
    other.start()
    gate.release()
    end = time.monotonic() + DEADLINE_S
    while not ran and time.monotonic() < end:
        call()
    released = bool(ran)
    other.join()
    return released


@pytest.mark.parametrize("name", ["peer_fault", "communicator_handles", "block_limits"])
def test_gil_is_released(name, no_switches):
    with memory_of(2) as memory:
        assert lets_others_run(partial(getattr(native.extension(), name), memory._id))


def test_gil_is_released_while_limits_are_lowered(no_switches):
    extension = native.extension()
    with memory_of(2) as memory:
        limits = extension.block_limits(memory._id)
        assert lets_others_run(partial(extension.limit_blocks, memory._id, limits))
        assert extension.block_limits(memory._id) == limits
