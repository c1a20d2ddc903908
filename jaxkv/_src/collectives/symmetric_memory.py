"""Symmetric memory: one workspace for each device of a mesh axis, mapped into all peers.

Creation of a `SymmetricMemory` allocates the workspaces, maps them into all peers and loads the
kernels, so a collective is a single kernel launch. Peers write to the workspaces only, never to
XLA's buffers. (The design of vLLM's custom all-reduce and of PyTorch's symmetric memory.)

The devices belong to one process or to several processes of one host, any number each. Memory of
another process is mapped through a CUDA IPC handle or, on the CPU backend, a file descriptor of
shared memory; `rendezvous` exchanges the handles, and creation succeeds or fails in all processes.

With JAXKV_MULTICAST=1 in the environment, each device has an additional workspace bound to an
NVLink multicast object, for reductions in the switch (`implementation="multimem"`). Requirements:
all devices belong to one process, and the driver reports multicast support. This has never run on
hardware. Where several machines share the GPUs of a host, a multicast object may take the GPUs out
of service, so no multicast function of the driver is called unless the variable is set. The CPU
backend emulates multicast in ordinary memory.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import pathlib
import warnings
import weakref
from typing import Any, NoReturn

import jax
import numpy as np

from jaxkv._src.collectives.rendezvous import Rendezvous
from jaxkv._src.runtime import native as runtime_native
from jaxkv._src.runtime.errors import PeerTimeoutError
from jaxkv._src.runtime.sharding import device_groups
from jaxkv._src.runtime.timeouts import checked_timeout_s
from jaxkv._src.tuning.all_reduce_table import VARIABLE, WORLD_SIZES, table_for
from jaxkv._src.version import __version__

WORD_BYTES = 16
LINE_BYTES = 128  # cache line, the unit of link transactions
TIMEOUT_S = 30.0
MULTICAST_VARIABLE = "JAXKV_MULTICAST"
# Receive buffers for all peers of a device, in bytes:
LOW_LATENCY_BYTES = 8 << 20  # LL buffers, two stages
SLOT_BYTES = 8 << 20  # slots read after a barrier, two stages
TILE_BYTES = 32 << 10  # tiles, 128 * 3 * 2 of them; for a two_shot too large for the LL buffers
MULTICAST_BYTES = 8 << 20  # one reduction in the switch


class SymmetricMemory:
    """One workspace for each device of a mesh axis, for collectives.

    Devices at different positions along the other axes of the mesh form independent groups. The
    memory is released by `close()`, at the end of a `with` block, or with the last reference to it;
    executables that use it afterwards fail with an error. (None may run concurrently; see `close`.)
    The design is that of vLLM's custom all-reduce and of PyTorch's symmetric memory.

        mesh = jax.make_mesh((2,), ("tp",))
        with jaxkv.SymmetricMemory.create(mesh, "tp", max_bytes=1 << 20) as memory:
            ...  # jaxkv.all_reduce(memory, x, "tp") inside shard_map

    If the mesh spans several processes, all of them must create the same memories in the same
    order (just as they run the same programs) and close them.

    Attributes:
      mesh: the mesh.
      axis_name: the axis of the collectives.
      world_size: number of devices along the axis.
      max_bytes: the largest array, in bytes, that collectives support with this memory.
      low_latency_bytes, slot_bytes: size of the receive buffer for one peer, see `all_reduce`.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, axis_name: str, max_bytes: int, timeout_s: float
    ) -> None:
        self.mesh = mesh
        self.axis_name = axis_name
        seconds = TIMEOUT_S
        # Arguments are validated later, in a step: processes match rendezvous by sequence number.
        with contextlib.suppress(ValueError):
            seconds = checked_timeout_s(timeout_s)
        self._rendezvous = Rendezvous(_processes(mesh), seconds)

        def arguments() -> tuple[dict[str, Any], str]:
            checked_timeout_s(timeout_s)
            self._configure(_groups(mesh, axis_name), _bytes_of(max_bytes))
            return self._arguments(), _host()

        self._check_arguments(self._rendezvous.step("SymmetricMemory.create, arguments", arguments))
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
          mesh: mesh of devices of one host, either CUDA devices with peer access or devices of
            the CPU backend. With several processes, `jax.distributed` must be initialized. The
            rank is the position along the axis, independent of the order of devices and processes.
          axis_name: the axis of the collectives, with 2, 4, 6 or 8 devices.
          max_bytes: the largest array to support, in bytes. The workspace takes up to 58 MiB of
            each device, and 8 MiB more with JAXKV_MULTICAST=1.
          timeout_s: limit, in seconds up to 1e9, of the wait of a device for its peers, and of a
            process for the others in each step of creation and in `close`. With several processes,
            the limit in the first call is ten times as long: each compiles the program at its own
            speed. (Before the first call of a later program, compile it and synchronize.)

        Raises:
          TypeError: `mesh` is not a `jax.sharding.Mesh`.
          ValueError: an invalid mesh, size, timeout or tuning table, or arguments that differ
            between processes.
          OSError: the tuning table named by the environment cannot be read.
          RuntimeError: out of memory, no peer access, a failed multicast call of the driver (with
            JAXKV_MULTICAST=1), or a process that timed out. With several processes, all of them
            raise this error with the text and index of the failed process, and free their memory.

        Example: `SymmetricMemory.create(mesh, "tp", max_bytes=1 << 20)`.
        """
        return cls(mesh, axis_name, max_bytes, timeout_s)

    def check_errors(self, *outputs: Any) -> None:
        """Raises if a device timed out waiting for a peer.

        Blocks on `outputs` only, so a step loop may call this every step. After an error, the
        results of the failed call and of all later calls are NaN: close this memory and create
        a new one.

        Args:
          *outputs: arrays or pytrees to block on first, so that errors of their computation are
            included.

        Raises:
          PeerTimeoutError: the waiting rank, the missing rank and the phase of the call.
          RuntimeError: the memory is closed.
        """
        jax.block_until_ready(outputs)
        if fault := runtime_native.extension().peer_fault(self._id):
            raise PeerTimeoutError(*fault)

    def close(self) -> None:
        """Frees the memory; idempotent.

        Block on the results of the last step first: a device that enters a call later fails, and
        its peers time out. No other thread may run a program with calls concurrently: on GPUs,
        those of several processes included, a CUDA graph that is being launched would use memory
        that is freed or no longer mapped. The same holds for dropping the last reference to this
        object.

        With several processes, each waits up to `timeout_s` until the others no longer address its
        memory. Memory that others may still address then stays allocated until the process ends,
        and a `RuntimeWarning` names those processes. Without `close` it stays allocated as well.
        """
        if not self._close.alive:
            return
        self._close()
        if missing := self._rendezvous.leave():
            warnings.warn(
                f"SymmetricMemory.close: timed out after {self._rendezvous.timeout_s:g} s waiting "
                f"for processes {missing} to close; memory that they may still access stays "
                "allocated until this process ends",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        runtime_native.extension().free_communicator(self._id)

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "SymmetricMemory cannot be copied or pickled: it owns memory of its devices, which "
            "close() of a copy would free; pass the object itself"
        )

    def _tile_bytes(self) -> int:
        """Tile size for a large two_shot; 0 if parts of `max_bytes` fit into half an LL buffer."""
        part = -(-self.max_bytes // self.world_size)
        fits = _round_up_to_words(part) <= self.low_latency_bytes // WORD_BYTES // 2 * WORD_BYTES
        return 0 if fits else _buffer_bytes(TILE_BYTES // self.world_size)

    def _multicast_bytes(self) -> int:
        return _round_up_to_words(
            min(max(self.max_bytes, self.world_size * WORD_BYTES), MULTICAST_BYTES)
        )

    def _configure(self, groups: np.ndarray, max_bytes: int) -> None:
        self.world_size = groups.shape[1]
        self.max_bytes = max_bytes
        low_latency_bytes = min(
            max(max_bytes, 2 * WORD_BYTES), LOW_LATENCY_BYTES // self.world_size
        )
        # two_shot uses one half for each phase.
        self.low_latency_bytes = _buffer_bytes(low_latency_bytes, halves=2)
        self.slot_bytes = _buffer_bytes(min(max_bytes, SLOT_BYTES // self.world_size))
        self._multicast_unsupported_reason = _multicast_unsupported_reason(groups)
        # Read once: a later change of the environment in one process must not separate the ranks.
        self._table = table_for(groups.flat[0].device_kind)

    def _arguments(self) -> dict[str, Any]:
        """Arguments that must be equal in all processes."""
        return {
            "jaxkv.__version__": __version__,
            "jax.__version__": jax.__version__,  # signatures hash the lowered program
            "devices": [device.id for device in self.mesh.devices.flat],
            "mesh": list(self.mesh.shape.items()),
            "axis_name": self.axis_name,
            "max_bytes": self.max_bytes,
            "timeout_s": self._rendezvous.timeout_s,
            f"tuning table ({VARIABLE})": self._table.rules[self.world_size],
        }

    def _check_arguments(self, arguments: dict[int, tuple[dict[str, Any], str]]) -> None:
        """Raises the same error in all processes if their arguments differ."""
        rendezvous = self._rendezvous
        if len({host for _, host in arguments.values()}) > 1:
            hosts = {process: host for process, (_, host) in arguments.items()}
            raise ValueError(f"SymmetricMemory.create supports processes of one host, got {hosts}")
        of_first, _ = arguments[rendezvous.processes[0]]
        for process, (of_process, _) in arguments.items():
            for name, value in of_process.items():
                if value != of_first[name]:
                    raise ValueError(
                        "SymmetricMemory.create: arguments must be equal in all processes, but "
                        f"{name} is {of_first[name]} in process {rendezvous.processes[0]} and "
                        f"{value} in process {process}"
                    )

    def _allocate_and_map(self, groups: np.ndarray) -> None:
        native, process_index = runtime_native.extension(), jax.process_index()
        ordinals = [
            [_ordinal(d) if d.process_index == process_index else -1 for d in group]
            for group in groups
        ]

        def allocate() -> tuple[list[list[list[int]]], list[int]]:
            self._id = native.create_communicator(
                groups.flat[0].platform,
                ordinals,
                self.low_latency_bytes // WORD_BYTES,
                self.slot_bytes // WORD_BYTES,
                self._tile_bytes() // WORD_BYTES,
                0 if self._multicast_unsupported_reason else self._multicast_bytes() // WORD_BYTES,
                int(self._rendezvous.timeout_s * 1e9),
            )
            return native.communicator_handles(self._id), native.block_limits(self._id)

        self._id = 0  # no communicator has this id
        try:
            allocated = self._rendezvous.step("SymmetricMemory.create, allocation", allocate)
        except BaseException:
            native.close_communicator(self._id)
            native.free_communicator(self._id)  # not mapped by any other process yet
            raise
        self._close = weakref.finalize(self, native.close_communicator, self._id)
        handles = [
            [allocated[device.process_index][0][g][rank] for rank, device in enumerate(group)]
            for g, group in enumerate(groups)
        ]

        def map_memory() -> None:
            native.map_communicator(self._id, handles)
            for _, limits in allocated.values():
                native.limit_blocks(self._id, limits)

        try:
            self._rendezvous.step("SymmetricMemory.create, mapping", map_memory)
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
        numbers = ", ".join(map(str, WORLD_SIZES[:-1]))
        raise ValueError(
            f"axis {axis_name!r} must have {numbers} or {WORLD_SIZES[-1]} devices, got {world_size}"
        )
    groups = device_groups(mesh, axis_name)
    platforms = {device.platform for device in groups.flat}
    if not platforms <= {"cpu"} and not platforms <= {"gpu"}:
        raise ValueError(f"all devices must be of platform cpu or all of gpu, got {platforms}")
    kinds = {device.device_kind for device in groups.flat}
    if len(kinds) > 1:  # thread block b waits for block b of its peers only
        raise ValueError(f"all devices must be of one kind, got {', '.join(sorted(kinds))}")
    return groups


def _processes(mesh: jax.sharding.Mesh) -> set[int]:
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"SymmetricMemory.create: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}"
        )
    processes = {device.process_index for device in mesh.devices.flat}
    if jax.process_index() not in processes:
        raise ValueError(f"mesh has no device of this process, process index {jax.process_index()}")
    return processes


def _bytes_of(max_bytes: int) -> int:
    try:
        number = operator.index(max_bytes)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"max_bytes must be an integer of at least 1 byte, got {max_bytes!r}")
    return number


def _multicast_unsupported_reason(groups: np.ndarray) -> str | None:
    """Reason against multimem, or None; queries the driver last, and only if enabled."""
    if os.environ.get(MULTICAST_VARIABLE) != "1":
        return f"{MULTICAST_VARIABLE}=1 was not set when its SymmetricMemory was created"
    processes = sorted({device.process_index for device in groups.flat})
    if len(processes) > 1:
        return f"devices must belong to one process, got processes {processes}"
    if groups.flat[0].platform == "cpu":
        return None
    supported = runtime_native.extension().multicast_supported
    without = [device.id for device in groups.flat if not supported(_ordinal(device))]
    return f"the driver reports no multicast support for devices {without}" if without else None


def _ordinal(device: jax.Device) -> int:
    """Device ordinal that XLA passes to handlers, for a device of this process."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _round_up_to_words(num_bytes: int) -> int:
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES


def _buffer_bytes(num_bytes: int, *, halves: int = 1) -> int:
    """Size of a receive buffer: a multiple of words or, above one line, of lines in each half.

    An unaligned buffer would spread the words of a warp over one more line.
    """
    unit = WORD_BYTES if num_bytes <= LINE_BYTES else halves * LINE_BYTES
    return -(-num_bytes // unit) * unit


@functools.cache
def _host() -> str:
    """Id of the host, equal in all its processes until a reboot."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
