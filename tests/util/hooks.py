"""Hooks of test builds of the extension: CMake option JAXKV_TEST_HOOKS, which `make` sets."""

import jax
import pytest

import jaxkv
from jaxkv._src.collectives.rendezvous import _key_value_store
from jaxkv._src.runtime import native


def available() -> bool:
    return hasattr(native.extension(), "set_test_state")


def require() -> None:
    if not available():
        pytest.skip("needs test hooks: build with cmake.define.JAXKV_TEST_HOOKS=ON, as make does")


def preset(
    memory: jaxkv.SymmetricMemory, epoch: int, *, ahead: int = 0, stall_s: float = 0.0
) -> None:
    """Sets the epoch of all ranks, modulo 2^64, while no call is in flight.

    With `ahead` > 0 all peers appear to be that number of barriers ahead, so that no wait blocks: a
    negative control for the waits. With `stall_s` > 0 threads occasionally stall in a call, by up
    to that number of seconds (in steps not yet captured in a CUDA graph). All processes must call
    this.
    """
    require()
    state = epoch % 2**64, ahead, int(stall_s * 1e9)
    set_state = native.extension().set_test_state
    memory._rendezvous.step("preset", lambda: set_state(memory._id, *state))


def barrier(memory: jaxkv.SymmetricMemory) -> None:
    """Blocks until all processes of the memory have arrived; needs no hook."""
    memory._rendezvous.step("barrier", lambda: None)


def tell_last() -> None:
    """Tells the last process, which waits in `wait_for_others`; once in a program."""
    _key_value_store().key_value_set(f"test/{jax.process_index()}", "")


def wait_for_others() -> None:
    for process in range(jax.process_count() - 1):
        _key_value_store().blocking_key_value_get(f"test/{process}", 120_000)
