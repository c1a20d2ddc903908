"""Host memory limits, and the NUMA node of a device."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxkv._src.runtime import native
from jaxkv._src.runtime.devices import platform_of
from jaxkv._src.runtime.errors import HostMemoryError


def check_host_memory(needed_bytes: int, *, shared: bool = False) -> None:
    """Raises HostMemoryError if `needed_bytes` exceed the available host memory.

    Available is the minimum of MemAvailable and of the bytes left under the limit of this process's
    address space (RLIMIT_AS) and under each memory limit of its control groups; of shared memory,
    also of the bytes left in /dev/shm. The locked-memory limit (RLIMIT_MEMLOCK) does not apply: the
    CUDA driver pins memory regardless of it, and the CPU backend does not pin memory.
    """
    limit, available = least_available(shared=shared)
    if needed_bytes > available:
        raise HostMemoryError(needed_bytes, available, limit)


def least_available(*, shared: bool = False) -> tuple[str, int]:
    """The limit of `check_host_memory` with the fewest bytes left: its name, and these."""
    limits = [("available memory (MemAvailable)", _mem_available())]
    limits += [*_address_space_left(), *_cgroup_limits()]
    if shared:
        limits += _shared_memory_left()
    limit, available = min(limits, key=lambda entry: entry[1])
    return limit, max(available, 0)


def _address_space_left() -> Iterator[tuple[str, int]]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        yield "the limit of the address space (RLIMIT_AS, ulimit -v)", limit - used


def _cgroup_limits() -> Iterator[tuple[str, int]]:
    """(name, bytes left) of each finite memory limit of this process's cgroups, v2 and v1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
            cache_field = "inactive_file"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cache_field = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory != root and root not in directory.parents:
                break
            left = _cgroup_bytes_left(directory, files, cache_field)
            if left is not None:
                yield f"{directory / files[0]}", left


def _cgroup_bytes_left(directory: Path, files: tuple[str, str], cache_field: str) -> int | None:
    try:
        limit, usage = ((directory / name).read_text().strip() for name in files)
        if limit == "max" or int(limit) >= 1 << 60:  # v1 writes "no limit" as a huge number
            return None
        fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return int(limit) - int(usage) + int(fields.get(cache_field, 0))
    except (OSError, ValueError):
        return None


def _shared_memory_left() -> Iterator[tuple[str, int]]:
    status = os.statvfs("/dev/shm")
    if status.f_blocks:  # otherwise without a limit
        name = "the free space of /dev/shm (mount option size; of a container --shm-size)"
        yield name, status.f_bavail * status.f_frsize


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def numa_node(device: jax.Device) -> int | None:
    """NUMA node of a GPU, or None if the machine has one node or does not report it."""
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if platform_of(device) != "gpu" or len(nodes) < 2:
        return None
    address = native.extension().pci_address(device.local_hardware_id).lower()
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
