"""Memory of ids and counts: kept until nothing refers to it and the programs before have run."""

import threading
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime import held_arrays
from jaxkv._src.runtime.held_arrays import FEW, HeldArrays
from jaxkv.recurrent import DeferredCounts


class Programs:
    """Enqueued programs, which have run once `ran` is set."""

    def __init__(self, ran: bool = False):
        self.ran = ran
        self.devices: list[set[jax.Device]] = []

    def __call__(self, devices):
        self.devices.append(set(devices))
        return [self]

    def is_ready(self) -> bool:
        return self.ran


def new_array(size: int = 1) -> jax.Array:
    return jax.block_until_ready(jnp.zeros(size, jnp.int32))


def hold_others(held: HeldArrays, number: int) -> None:
    for _ in range(number):
        held.hold(new_array())


def test_unused_array_stays_until_the_programs_before_have_run():
    programs = Programs()
    held = HeldArrays(programs)
    array = weakref.ref(kept := new_array())
    held.hold(kept)
    del kept
    hold_others(held, 10 * FEW)
    assert array() is not None
    programs.ran = True
    hold_others(held, 2 * FEW)
    assert array() is None


def test_program_is_enqueued_only_after_the_last_other_reference_is_gone():
    """A program that was enqueued earlier would say nothing about those that still use it."""
    programs = Programs(ran=True)
    held = HeldArrays(programs)
    used = new_array()
    held.hold(used)
    other = jax.tree.leaves({"ids": used})
    array = weakref.ref(used)
    del used
    hold_others(held, 10 * FEW)
    assert array() is not None
    programs.ran = False
    del other
    hold_others(held, 10 * FEW)
    assert array() is not None
    programs.ran = True
    hold_others(held, 4 * FEW)
    assert array() is None


def test_few_released_arrays_are_kept():
    held = HeldArrays(Programs(ran=True))
    arrays = []
    for _ in range(20 * FEW):
        arrays.append(weakref.ref(array := new_array()))
        held.hold(array)
        del array
    assert sum(array() is not None for array in arrays) <= 2 * FEW


def test_few_large_arrays_are_kept():
    held = HeldArrays(Programs(ran=True))
    arrays = []
    for _ in range(40):
        arrays.append(weakref.ref(array := new_array(FEW << 12)))
        held.hold(array)
        del array
    assert sum(array() is not None for array in arrays) <= 10


@pytest.mark.parametrize("live", [0, 1000])
def test_checks_are_few(live):
    """Not one for each new array, also if there are many in use."""
    programs = Programs(ran=True)
    held = HeldArrays(programs)
    arrays = [new_array() for _ in range(live)]
    for array in arrays:
        held.hold(array)
    programs.devices.clear()
    hold_others(held, 20 * FEW)
    assert len(programs.devices) <= 20


def test_programs_run_on_the_devices_of_the_arrays():
    programs = Programs()
    held = HeldArrays(programs)
    hold_others(held, 2 * FEW)
    assert programs.devices[0] == new_array().sharding.device_set


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_arrays_are_kept_if_no_program_can_be_enqueued(error):
    def fail(devices):
        raise error

    programs = Programs()
    held = HeldArrays(fail)
    arrays = []
    for _ in range(FEW - 1):
        arrays.append(weakref.ref(array := new_array()))
        held.hold(array)
    used = new_array()
    with pytest.raises(error):
        held.hold(used)
    del array
    assert all(array() is not None for array in arrays)
    held._enqueue = programs
    hold_others(held, FEW)
    assert all(array() is not None for array in arrays)
    programs.ran = True
    hold_others(held, 10 * FEW)
    assert all(array() is None for array in arrays)
    assert not used.is_deleted()


def test_threads():
    """None is lost or freed while another thread holds its own."""
    held = HeldArrays(Programs(ran=True))
    failures = []

    def work():
        mine = [new_array() for _ in range(3 * FEW)]
        refs = [weakref.ref(array) for array in mine]
        for array in mine:
            held.hold(array)
        if any(ref() is None for ref in refs):
            failures.append("freed")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_garbage_collection_while_an_array_is_held():
    """Finalizers may hold arrays, also while their thread or another one holds one."""
    held = HeldArrays(Programs(ran=True))
    kept = new_array()
    interrupted = 0

    def hold_in_a_finalizer(array):
        nonlocal interrupted
        if interrupted < 3:
            interrupted += 1
            held.hold(kept)
        return 1

    with mock.patch.object(held_arrays, "_weight", hold_in_a_finalizer):
        thread = threading.Thread(target=lambda: hold_others(held, 2 * FEW), daemon=True)
        thread.start()
        thread.join(timeout=30)
    assert not thread.is_alive() and interrupted == 3


def parts_of_a_pair() -> tuple[jaxkv.HostIds, ...]:
    return tuple(jaxkv.HostIdPair([1, 2], [3, 4]))


def counts_of_a_step() -> DeferredCounts:
    start = jax.jit(lambda n: DeferredCounts.start(n, step=1, request_ids=n))
    return jax.block_until_ready(start(np.zeros(3, np.int32)))


NEW = {
    "HostIds": lambda: jaxkv.HostIds([1, 2]),
    "HostIdPair": lambda: jaxkv.HostIdPair([1, 2], [3, 4]),
    "parts of a HostIdPair": parts_of_a_pair,
    "DeferredCounts": counts_of_a_step,
}


def make_others(number: int) -> None:
    """An array counts as used until its upload is over."""
    for _ in range(number):
        jax.block_until_ready(jaxkv.HostIds([0]))


@pytest.mark.parametrize("kind", NEW)
def test_arrays_are_held_on_a_platform_that_reuses_memory_early(kind):
    programs = Programs()
    with (
        mock.patch.object(held_arrays, "PLATFORMS", {jax.local_devices()[0].platform}),
        mock.patch.object(held_arrays, "_arrays", HeldArrays(programs)),
    ):
        made = NEW[kind]()
        words = weakref.ref(jax.tree.leaves(made)[0])
        make_others(3 * FEW)
        del made
        make_others(10 * FEW)
        assert words() is not None
        programs.ran = True
        make_others(10 * FEW)
        assert words() is None


def test_array_of_several_objects_is_freed():
    held = HeldArrays(Programs(ran=True))
    array = weakref.ref(kept := new_array())
    for _ in range(3):
        held.hold(kept)
    del kept
    hold_others(held, 4 * FEW)
    assert array() is None


def test_deleted_array():
    held = HeldArrays(Programs(ran=True))
    array = weakref.ref(deleted := new_array())
    held.hold(deleted)
    deleted.delete()
    del deleted
    hold_others(held, 4 * FEW)
    assert array() is None


def test_enqueued_program_runs():
    """The compiled program, on each device; also while another is traced."""
    devices = jax.local_devices()
    held_arrays._program.cache_clear()

    @jax.jit
    def traced(x):
        programs.extend(held_arrays._enqueue(devices))
        return x

    programs: list = []
    traced(1)
    assert [int(np.asarray(program)) for program in programs] == [1] * len(devices)
