"""Memory that all devices along a mesh axis address, for collectives inside one kernel each.

Everything is allocated, mapped into the peers and loaded when a `SymmetricMemory` is created, so a
collective only launches a kernel. Peers write to this memory alone, never to XLA's buffers. (The
design of vLLM's custom all-reduce and of torch's symmetric memory.)

The devices may belong to one process or to several of one host, any number to each. Memory of
another process comes by a CUDA IPC handle or, on the CPU backend, by a file descriptor of shared
memory; `rendezvous` carries the handles and sees to it that creation succeeds for all or
fails for all.

With JAXKV_MULTICAST=1 in the environment there is one more workspace for each device, bound to an
NVLink multicast object, so that the switch can add up (`implementation="multimem"`); if all devices
belong to one process and the driver reports multicast for them. This has never run on hardware, and
where machines share the GPUs of a host a multicast object may take them out of service: without the
variable nothing of the driver's multicast is called. On the CPU backend memory stands in for it.
"""

from __future__ import annotations

import functools
import numbers
import operator
import os
import pathlib
import warnings
import weakref
from typing import Any

import jax
import numpy as np

from jaxkv._src.collectives.rendezvous import Rendezvous
from jaxkv._src.runtime import native as runtime_native
from jaxkv._src.runtime.errors import PeerTimeoutError
from jaxkv._src.runtime.sharding import device_groups
from jaxkv._src.tuning.all_reduce_table import VARIABLE, WORLD_SIZES, table_for
from jaxkv._src.version import __version__

WORD_BYTES = 16
LINE_BYTES = 128  # which links carry at once
TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 1e9  # in nanoseconds, and added to a clock, it fits into 64 bits
MULTICAST_VARIABLE = "JAXKV_MULTICAST"
# Of the mailboxes of all peers, in bytes:
LOW_LATENCY_BYTES = 8 << 20  # twice; their data says itself that it arrived
SLOT_BYTES = 8 << 20  # twice; before a barrier
TILE_BYTES = 32 << 10  # 128 * 3 * 2 times; of a two_shot that does not fit into the first
MULTICAST_BYTES = 8 << 20  # of what a switch adds up at once


class SymmetricMemory:
    """A workspace per device along one axis of a mesh, and the collectives that use it.

    Devices that differ in the mesh's other axes are other groups, which never meet. It lives until
    `close()`, or as a context manager until the end of the block; executables that use it after
    that fail with an error.

    Where the mesh spans several processes, all of them create the same memories in the same order
    (as they run the same programs), and close them.

    Attributes:
      mesh: as given.
      axis_name: as given.
      world_size: devices along the axis.
      max_bytes: the largest array, in bytes, that collectives serve with this memory.
      low_latency_bytes, slot_bytes: of a mailbox, see `all_reduce`.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, axis_name: str, max_bytes: int, timeout_s: float
    ) -> None:
        self.mesh = mesh
        self.axis_name = axis_name
        seconds = _seconds_of(timeout_s)
        # Refusals come later, in a step of all: processes meet by the number of their meetings.
        self._rendezvous = Rendezvous(_processes(mesh), seconds or TIMEOUT_S)

        def arguments() -> list[Any]:
            if seconds is None:
                raise ValueError(
                    f"timeout_s must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds, "
                    f"got {timeout_s!r}"
                )
            self._take(_groups(mesh, axis_name), _bytes_of(max_bytes))
            return [self._arguments(), _host()]

        self._agree(self._rendezvous.step("arguments of symmetric memory", arguments))
        self._allocate_and_map(device_groups(mesh, axis_name))

    @classmethod
    def create(
        cls,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        *,
        max_bytes: int = 64 << 20,
        timeout_s: float = TIMEOUT_S,
    ) -> SymmetricMemory:
        """Allocates the workspaces, maps them into all peers and loads all kernels.

        Args:
          mesh: of devices of one host, CUDA devices with peer access or the CPU backend's. With
            those of other processes, `jax.distributed` must have been initialised. A rank is a
            place along the axis, whatever the order of devices and processes.
          axis_name: the axis along which devices work together; 2, 4, 6 or 8 of them.
          max_bytes: the largest array, in bytes, to serve. A device gives up to
            58 MiB for it, and 8 MiB more with JAXKV_MULTICAST=1.
          timeout_s: how long a device waits for its peers, in seconds, up to 1e9; and a process
            for the others, in each step of creation and in `close`.

        Raises:
          ValueError: the mesh, a number or the tuning table does not fit, or not to those of
            another process, and why.
          OSError: the tuning table that the environment names can't be read.
          RuntimeError: no memory, no peer access, or with JAXKV_MULTICAST=1 a call of the driver
            for multicast that failed; or a process did not come. With several processes all raise
            this instead of what one of them found, with its text and the process's number, and all
            free what they had.
        """
        return cls(mesh, axis_name, max_bytes, timeout_s)

    def check_errors(self, *outputs: Any) -> None:
        """Raises if a device waited in vain for a peer.

        Waits for nothing but `outputs`, so a step loop may call this every step. After an error the
        results of that call and of all later ones are NaN: close this memory and create another.

        Args:
          *outputs: arrays or pytrees to wait for first, to be sure of the work that made them.

        Raises:
          PeerTimeoutError: which rank waited for which, where.
          RuntimeError: it was closed.
        """
        jax.block_until_ready(outputs)
        if fault := runtime_native.extension().peer_fault(self._id):
            raise PeerTimeoutError(*fault)

    def preset(self, epoch: int, *, ahead: int = 0, stall_s: float = 0.0) -> None:
        """For tests, while no call runs: sets how many barriers all ranks have passed, modulo 2^64.

        With `ahead` > 0 all peers seem to have come so many barriers further, so that no wait
        waits: a control for what waits are good for. With `stall_s` > 0 threads are late inside
        of a call now and then, by up to so many seconds (in steps that no graph holds yet). Of
        several processes, all must call this.
        """
        preset = runtime_native.extension().set_test_state
        numbers = epoch % 2**64, ahead, int(stall_s * 1e9)
        self._rendezvous.step("preset", lambda: preset(self._id, *numbers))

    def close(self) -> None:
        """Frees the memory; closing again does nothing.

        Wait for the results of the last step first: a device that comes later fails, and its peers
        wait for it until their time is over. No other thread may dispatch a step meanwhile: on GPUs
        of one process a call that is just being launched would use memory that is freed.

        Of several processes, each waits until the others no longer address its memory, up to
        `timeout_s`. What others may still address then, or if this was not called, stays allocated
        until the process ends; a `RuntimeWarning` names them.
        """
        if not self._close.alive:
            return
        self._close()
        if missing := self._rendezvous.leave():
            warnings.warn(
                f"processes {missing} have not closed their symmetric memory within "
                f"{self._rendezvous.timeout_s:g} s: what they may still address stays allocated",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        runtime_native.extension().free_communicator(self._id)

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tile_bytes(self) -> int:
        """Of a box of a larger two_shot; 0 if each part of the largest one fits into half a box."""
        part = -(-self.max_bytes // self.world_size)
        fits = _whole_words(part) <= self.low_latency_bytes // WORD_BYTES // 2 * WORD_BYTES
        return 0 if fits else _box_bytes(TILE_BYTES // self.world_size)

    def _multicast_bytes(self) -> int:
        return _whole_words(min(max(self.max_bytes, self.world_size * WORD_BYTES), MULTICAST_BYTES))

    def _take(self, groups: np.ndarray, max_bytes: int) -> None:
        self.world_size = groups.shape[1]
        self.max_bytes = max_bytes
        low_latency_bytes = min(
            max(max_bytes, 2 * WORD_BYTES), LOW_LATENCY_BYTES // self.world_size
        )
        self.low_latency_bytes = _box_bytes(
            low_latency_bytes, halves=2
        )  # where two_shot has its parts
        self.slot_bytes = _box_bytes(min(max_bytes, SLOT_BYTES // self.world_size))
        self._multicast_unsupported_reason = _multicast_unsupported_reason(groups)
        # Kept, or ranks could go different ways after a change of the environment in one process.
        self._table = table_for(groups.flat[0].device_kind)

    def _arguments(self) -> dict[str, Any]:
        """What must be the same in all processes."""
        return {
            "jaxkv.__version__": __version__,
            "jax.__version__": jax.__version__,  # signatures of calls are of what it lowers
            "devices": [device.id for device in self.mesh.devices.flat],
            "mesh": list(self.mesh.shape.items()),
            "axis_name": self.axis_name,
            "max_bytes": self.max_bytes,
            "timeout_s": self._rendezvous.timeout_s,
            f"tuning table ({VARIABLE})": self._table.rules[self.world_size],
        }

    def _agree(self, said: dict[int, Any]) -> None:
        """Raises the same error in all processes unless they ask for the same thing."""
        rendezvous = self._rendezvous
        if len({host for _, host in said.values()}) > 1:
            hosts = {process: host for process, (_, host) in said.items()}
            raise ValueError(f"symmetric memory serves the processes of one host, got {hosts}")
        of_first, _ = said[rendezvous.processes[0]]
        for process, (of_process, _) in said.items():
            for name, value in of_process.items():
                if value != of_first[name]:
                    raise ValueError(
                        f"all processes must create the same symmetric memory, but {name} is "
                        f"{of_first[name]} in process {rendezvous.processes[0]} and {value} in "
                        f"process {process}"
                    )

    def _allocate_and_map(self, groups: np.ndarray) -> None:
        native, me = runtime_native.extension(), jax.process_index()
        ordinals = [
            [_ordinal(d) if d.process_index == me else -1 for d in group] for group in groups
        ]

        def allocate() -> list[list[list[int]]]:
            self._id = native.create_communicator(
                groups.flat[0].platform,
                ordinals,
                self.low_latency_bytes // WORD_BYTES,
                self.slot_bytes // WORD_BYTES,
                self._tile_bytes() // WORD_BYTES,
                0 if self._multicast_unsupported_reason else self._multicast_bytes() // WORD_BYTES,
                int(self._rendezvous.timeout_s * 1e9),
            )
            return native.communicator_handles(self._id)

        self._id = 0  # which is none's
        try:
            said = self._rendezvous.step("memory", allocate)
        except BaseException:
            native.close_communicator(self._id)
            native.free_communicator(self._id)  # which no other process has mapped
            raise
        self._close = weakref.finalize(self, native.close_communicator, self._id)
        handles = [
            [said[device.process_index][g][rank] for rank, device in enumerate(group)]
            for g, group in enumerate(groups)
        ]
        try:
            self._rendezvous.step(
                "access to peers", lambda: native.map_communicator(self._id, handles)
            )
        except BaseException:
            self.close()
            raise


def _groups(mesh: jax.sharding.Mesh, axis_name: str) -> np.ndarray:
    """The devices, `[num_groups, world_size]`."""
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name must be one of the mesh's {mesh.axis_names}, got {axis_name!r}"
        )
    world_size = mesh.shape[axis_name]
    if world_size not in WORLD_SIZES:
        raise ValueError(
            f"axis {axis_name!r} must have {', '.join(map(str, WORLD_SIZES))} devices, "
            f"got {world_size}"
        )
    groups = device_groups(mesh, axis_name)
    platforms = {device.platform for device in groups.flat}
    if not platforms <= {"cpu"} and not platforms <= {"gpu"}:
        raise ValueError(f"all devices must be of platform cpu or all of gpu, got {platforms}")
    kinds = {device.device_kind for device in groups.flat}
    if len(kinds) > 1:  # block b of a kernel meets only block b of its peers
        raise ValueError(f"all devices must be of one kind, got {', '.join(sorted(kinds))}")
    return groups


def _processes(mesh: jax.sharding.Mesh) -> set[int]:
    processes = {device.process_index for device in mesh.devices.flat}
    if jax.process_index() not in processes:
        raise ValueError(f"the mesh has no device of this process, number {jax.process_index()}")
    return processes


def _bytes_of(max_bytes: Any) -> int:
    try:
        number = operator.index(max_bytes)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"max_bytes must be an integer of at least 1 byte, got {max_bytes!r}")
    return number


def _seconds_of(timeout_s: Any) -> float | None:
    """None if nothing can wait for so long."""
    seconds = float(timeout_s) if isinstance(timeout_s, numbers.Real) else 0.0
    return seconds if 0 < seconds <= MAX_TIMEOUT_S else None


def _multicast_unsupported_reason(groups: np.ndarray) -> str | None:
    """Why no switch is to add up for these devices; asks the driver last, and only if told to."""
    if os.environ.get(MULTICAST_VARIABLE) != "1":
        return f"{MULTICAST_VARIABLE} was not 1 in the environment when its memory was created"
    processes = sorted({device.process_index for device in groups.flat})
    if len(processes) > 1:
        return f"its devices must belong to one process, got those of processes {processes}"
    if groups.flat[0].platform == "cpu":
        return None
    supported = runtime_native.extension().multicast_supported
    without = [device.id for device in groups.flat if not supported(_ordinal(device))]
    return f"the driver reports no multicast for devices {without}" if without else None


def _ordinal(device: jax.Device) -> int:
    """What XLA calls a device of this process in handlers."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES


def _box_bytes(num_bytes: int, *, halves: int = 1) -> int:
    """Of a mailbox: whole words or, above a line, as many whole lines in each of its halves.

    A warp's words would lie across one more line if a box began inside of one.
    """
    unit = WORD_BYTES if num_bytes <= LINE_BYTES else halves * LINE_BYTES
    return -(-num_bytes // unit) * unit


@functools.cache
def _host() -> str:
    """The same in all processes of a host, until it boots again."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
