"""Memory that all devices along a mesh axis address, for collectives inside one kernel each.

Everything is allocated, mapped into the peers and loaded when a `SymmetricMemory` is created, so a
collective only launches a kernel. Peers write to this memory alone, never to XLA's buffers. (The
design of vLLM's custom all-reduce and of torch's symmetric memory.)
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from jaxkv import _native
from jaxkv.errors import PeerTimeoutError

WORLD_SIZES = (2, 4, 6, 8)
WORD_BYTES = 16
# Of the mailboxes of all peers, in bytes:
QUICK_BYTES = 8 << 20  # eight times; their data says itself that it arrived
SLOT_BYTES = 8 << 20  # twice; before a barrier


class SymmetricMemory:
    """A workspace per device along one axis of a mesh, and the collectives that use it.

    Devices that differ in the mesh's other axes are other groups, which never meet. It lives until
    `close()`, or as a context manager until the end of the block; executables that use it after
    that fail with an error.

    Attributes:
      mesh: as given.
      axis_name: as given.
      world_size: devices along the axis.
      max_bytes: the largest array, in bytes, that collectives serve with this memory.
      quick_bytes, slot_bytes: of a mailbox, see `jaxkv.all_reduce`.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, axis_name: str, max_bytes: int, timeout_s: float
    ) -> None:
        groups = _groups(mesh, axis_name)
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1 byte, got {max_bytes}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0 seconds, got {timeout_s}")
        self.mesh = mesh
        self.axis_name = axis_name
        self.world_size = groups.shape[1]
        self.max_bytes = max_bytes
        self.quick_bytes = _whole_words(min(max(max_bytes, 32), QUICK_BYTES // self.world_size))
        self.slot_bytes = _whole_words(min(max_bytes, SLOT_BYTES // self.world_size))
        native = _native.extension()
        self._id = native.create_communicator(
            groups.flat[0].platform,
            [[device.local_hardware_id for device in group] for group in groups],
            self.quick_bytes // WORD_BYTES,
            self.slot_bytes // WORD_BYTES,
            int(timeout_s * 1e9),
        )
        self._close = weakref.finalize(self, native.close_communicator, self._id)
        self._order = _Order()

    @classmethod
    def create(
        cls,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        *,
        max_bytes: int = 64 << 20,
        timeout_s: float = 30.0,
    ) -> SymmetricMemory:
        """Allocates the workspaces, maps them into all peers and loads all kernels.

        Args:
          mesh: of devices of this process, CUDA devices with peer access or the CPU backend's.
          axis_name: the axis along which devices work together; 2, 4, 6 or 8 of them.
          max_bytes: the largest array, in bytes, to serve. A device gives up to
            80 MiB for it.
          timeout_s: how long a device waits for its peers, in seconds.

        Raises:
          ValueError: the mesh or a number does not fit, and why.
          NotImplementedError: the mesh has devices of other processes.
          RuntimeError: no memory, or no peer access.
        """
        return cls(mesh, axis_name, max_bytes, timeout_s)

    def all_reduce(self, x: Any, axis_name: str, *, implementation: str | None = None) -> Any:
        """`jax.lax.psum(x, axis_name)`, by `jaxkv.all_reduce.all_reduce`."""
        from jaxkv.all_reduce import all_reduce  # which knows this module

        return all_reduce(self, x, axis_name, implementation=implementation)

    def check(self, *outputs: Any) -> None:
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
        if fault := _native.extension().peer_fault(self._id):
            raise PeerTimeoutError(*fault)

    def preset(self, epoch: int, *, ahead: int = 0, stall_s: float = 0.0) -> None:
        """For tests, while no call runs: sets how many barriers all ranks have passed, modulo 2^64.

        With `ahead` > 0 all peers seem to have come so many barriers further, so that no wait
        waits: a control for what waits are good for. With `stall_s` > 0 threads are late inside
        of a call now and then, by up to so many seconds (in steps that no graph holds yet).
        """
        stall_ns = int(stall_s * 1e9)
        _native.extension().preset_communicator(self._id, epoch % 2**64, ahead, stall_ns)

    def close(self) -> None:
        """Frees the memory; closing again does nothing.

        Wait for the results of the last step first: a device that comes later fails, and its peers
        wait for it until their time is over.
        """
        self._close()

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Order:
    """Hands each call of a trace what the call before it returned, so that none overtakes another.

    All devices run one program, but only data keeps its calls in one order: the CPU backend runs
    what does not depend on each other at the same time. A body that is traced by itself (of a loop,
    of an inner jit) starts anew.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, weakref.ref]] = []  # trace, token, result

    def last_token(self) -> Any | None:
        trace = get_opaque_trace_state()
        return next((token for at, token, _ in reversed(self._calls) if at == trace), None)

    def append(self, token: Any, result: Any) -> None:
        # What nothing uses any more is no part of its trace, and a trace that ended is let go.
        def drop(dead: weakref.ref) -> None:
            self._calls = [call for call in self._calls if call[2] is not dead]

        trace = get_opaque_trace_state()
        self._calls.append((trace, token, weakref.ref(result, drop)))


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
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), -1)
    platforms = {device.platform for device in devices.flat}
    if not platforms <= {"cpu"} and not platforms <= {"gpu"}:
        raise ValueError(f"all devices must be of platform cpu or all of gpu, got {platforms}")
    if {device.process_index for device in devices.flat} != {jax.process_index()}:
        raise NotImplementedError("symmetric memory serves the devices of one process only")
    return devices.reshape(-1, world_size)


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES
