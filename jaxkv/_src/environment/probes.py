"""Probes of the environment report: `python -m jaxkv.env [--json]`.

The output is meant for bug reports: versions, GPUs, memory limits and the implementation that each
operation selects on this machine, without host names, user names and directories. A failed probe
reports its reason and does not stop the others.
"""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import resource
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from jaxkv._src.environment.driver import Driver

T = TypeVar("T")

PROBE_BYTES = 1 << 20
ENVIRONMENT_PREFIXES = ("JAX_", "JAXKV_", "XLA_", "CUDA_", "NCCL_", "TF_GPU_", "LD_LIBRARY_PATH")
ADDRESSES = re.compile("ADDRESS|COMM_ID")  # values with host names
CUDA_LIBRARY = re.compile(
    r"lib(cuda|cudart|nccl|cublas\w*|cudnn\w*|cufft|cusolver|cusparse|cupti|nvrtc|nvJitLink|nvshmem\w*)"
    r"\.so[.\d]*$"
)
# Values of CUdevice_attribute in cuda.h.
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
MULTIPROCESSOR_COUNT, MULTICAST_SUPPORTED, HOST_NUMA_ID = 16, 132, 134


def _attempt(probe: Callable[[], T]) -> T | str:
    try:
        return probe()
    except Exception as error:  # a broken component must not prevent the report
        return f"unavailable: {type(error).__name__}: {error}"


def _read(path: str | pathlib.Path) -> str:
    return pathlib.Path(path).read_text().strip()


def date() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    packages = ("jaxkv", "jax", "jaxlib", "numpy")
    return {
        "python": platform.python_version(),
        "os": _attempt(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
        "machine": platform.machine(),
        **{name: _attempt(partial(importlib.metadata.version, name)) for name in packages},
    }


def devices() -> dict[str, Any]:
    """Devices as JAX reports them; initializes the backend, which loads its CUDA libraries."""
    import jax

    found = jax.local_devices()
    return {
        "backend": jax.default_backend(),
        "processes": jax.process_count(),
        "kind": found[0].device_kind,
        "count": len(found),
        "memory_kinds": sorted(memory.kind for memory in found[0].addressable_memories()),
    }


def driver() -> dict[str, str]:
    def module() -> str:
        found = re.search(r"\d+(\.\d+)+", _read("/proc/driver/nvidia/version"))
        return (
            found.group()
            if found
            else "unavailable: no version number in the driver's version file"
        )

    return {"cuda": Driver().version(), "kernel_module": _attempt(module)}


def pcie_links() -> dict[str, dict[str, str]]:
    """Current and maximum PCIe generation and width by PCI address; idle links downshift."""
    fields = ["pci.bus_id"] + [
        f"pcie.link.{what}.{when}" for what in ("gen", "width") for when in ("current", "max")
    ]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    links = {}
    for line in output.splitlines():
        address, gen, gen_max, width, width_max = (field.strip() for field in line.split(","))
        links[address.lower()[-12:]] = {
            "current": f"gen {gen} x{width}",
            "max": f"gen {gen_max} x{width_max}",
        }
    return links


def gpus(cuda: Driver | None = None) -> list[dict[str, Any]]:
    cuda = cuda or Driver()
    links = _attempt(pcie_links)
    return [_gpu(cuda, device, links) for device in cuda.devices()]


def _gpu(cuda: Driver, device: int, links: dict[str, dict[str, str]] | str) -> dict[str, Any]:
    address = cuda.pci_address(device)
    major = cuda.attribute(device, COMPUTE_CAPABILITY_MAJOR)
    minor = cuda.attribute(device, COMPUTE_CAPABILITY_MINOR)

    def numa_node() -> int:
        return int(_read(f"/sys/bus/pci/devices/{address}/numa_node"))

    return {
        "name": cuda.name(device),
        "compute_capability": f"{major}.{minor}",
        "multiprocessors": cuda.attribute(device, MULTIPROCESSOR_COUNT),
        "memory_bytes": cuda.memory_bytes(device),
        "pci_address": address,
        "pcie_link": links.get(address) if isinstance(links, dict) else links,
        "numa_node": _attempt(numa_node),
        "driver_numa_node": _attempt(lambda: cuda.attribute(device, HOST_NUMA_ID)),
        "multicast_supported": _attempt(lambda: bool(cuda.attribute(device, MULTICAST_SUPPORTED))),
    }


def peer_access(cuda: Driver | None = None) -> list[list[bool]]:
    """Row i, column j: GPU i can map the memory of GPU j (true on the diagonal)."""
    cuda = cuda or Driver()
    found = cuda.devices()
    return [[a == b or cuda.can_access_peer(a, b) for b in found] for a in found]


def cuda_libraries() -> dict[str, Any]:
    """CUDA libraries loaded in this process, and the installed packages that may provide them."""
    mapped = {line.split()[-1] for line in _read("/proc/self/maps").splitlines()}
    paths = [pathlib.PurePath(path) for path in sorted(mapped) if CUDA_LIBRARY.search(path)]
    packages = {
        distribution.name: distribution.version
        for distribution in importlib.metadata.distributions()
        if (distribution.name or "").startswith(("nvidia-", "jax-cuda"))
    }
    return {
        "loaded": {path.name: _origin(path) for path in paths},
        "installed": dict(sorted(packages.items())),
    }


def _origin(path: pathlib.PurePath) -> str:
    """`package nvidia/nccl/lib` for a library from site-packages, `system` for any other."""
    parts = path.parent.parts
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            return "package " + "/".join(parts[parts.index(root) + 1 :])
    return "system"


def memory() -> dict[str, Any]:
    """Memory limits of a host pool in bytes; None for unlimited."""
    from jaxkv._src.cache import host_memory

    available = [left for _, left in host_memory._cgroup_limits()]
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    meminfo = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    return {
        "locked_limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "locked_hard_limit_bytes": None if hard == resource.RLIM_INFINITY else hard,
        "cgroup_available_bytes": min(available, default=None),
        "total_bytes": int(meminfo["MemTotal"].split()[0]) * 1024,
        "available_bytes": int(meminfo["MemAvailable"].split()[0]) * 1024,
    }


def pinned_host() -> dict[str, Any]:
    """Reads back a small pinned host buffer of JAX, and the NUMA nodes of one of the library."""
    import jax
    import numpy as np

    from jaxkv._src.cache.host_memory import numa_node

    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    expected = np.arange(PROBE_BYTES, dtype=np.uint8)
    array = jax.device_put(expected, sharding).block_until_ready()
    return {
        "bytes": array.nbytes,
        "memory_kind": array.sharding.memory_kind,
        "read_back_equal": bool(np.array_equal(np.asarray(array), expected)),
        "numa_nodes": {
            str(device): {
                "of_device": numa_node(device),
                "of_pages": _attempt(partial(_page_nodes, device)),
            }
            for device in jax.local_devices()
        },
    }


def _page_nodes(device: Any) -> dict[str, int]:
    """Number of pages on each NUMA node, of pinned memory for a device."""
    import jax
    import numpy as np

    from jaxkv._src.cache.pinned_memory import nodes_of, pinned_zeros

    array = pinned_zeros(PROBE_BYTES, np.uint8, jax.sharding.SingleDeviceSharding(device))
    return {str(node): pages for node, pages in nodes_of(array)[device].items()}


def numa() -> dict[str, dict[str, str]]:
    nodes = sorted(pathlib.Path("/sys/devices/system/node").glob("node[0-9]*"))
    if not nodes:
        raise OSError("the kernel reports no NUMA nodes")
    return {
        node.name: {
            "cpus": _read(node / "cpulist"),
            "memory": " ".join(_read(node / "meminfo").splitlines()[0].split()[-2:]),
        }
        for node in nodes
    }


def environment() -> dict[str, str]:
    return {
        name: "(address omitted)" if ADDRESSES.search(name) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES)
    }


def native() -> dict[str, Any]:
    """The native extension: CUDA support and registered FFI targets."""
    import jax

    from jaxkv._src.runtime import native as runtime_native

    extension = runtime_native.extension()
    targets = {platform: sorted(found) for platform, found in extension.registrations().items()}
    header = _read(pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h"))
    version = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header)
    return {"cuda": extension.CUDA, "targets": targets, "ffi_api_of_jaxlib": ".".join(version)}


def implementations() -> dict[str, str]:
    """Implementation of each operation for an example cache, with reasons against faster ones.

    The two layouts represent long and short contiguous runs, the two counts small and large
    payloads.
    """
    import jax
    import jax.numpy as jnp

    import jaxkv
    from jaxkv._src.cache.host_layout import HostLayout

    pages = 4096
    spec = jaxkv.KVCacheSpec(
        num_layers=2, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16
    )
    block = cast(jax.Array, jax.ShapeDtypeStruct((pages, *spec.block_shape), spec.dtype))
    on_host = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    host_block = jax.ShapeDtypeStruct(block.shape, block.dtype, sharding=on_host)
    cache = jaxkv.DeviceCache(layers=((block, block),) * 2, spec=spec)
    calls: dict[str, tuple[Callable[..., Any], Any, Any]] = {}
    for layout in ("page_first_direct", "page_first"):
        data = jax.ShapeDtypeStruct(HostLayout(spec, layout, pages).shape, spec.dtype)
        pool = jaxkv.HostPool(data=cast(jax.Array, data), spec=spec, layout=layout, head_groups=1)
        calls[f"load_pages, {layout}"] = jaxkv.load_pages, pool, cache
        calls[f"store_pages, {layout}"] = jaxkv.store_pages, pool, cache
    calls["swap_blocks, host to device"] = jaxkv.swap_blocks, host_block, block
    calls["swap_blocks, within the device"] = jaxkv.swap_blocks, block, block
    names: dict[str, list[str]] = {}  # by explanation, which many calls share
    for name, (operation, source, destination) in calls.items():
        for count in (8, pages):
            ids: dict[str, Any] = {
                "HostIds": jaxkv.HostIds(list(range(count))),
                "device ids": jax.ShapeDtypeStruct((count,), jnp.int32),
            }
            for kind, value in ids.items():
                text = jaxkv.explain(operation, source, destination, value, value)
                names.setdefault(text, []).append(f"{name}, {count} {kind}")
    return {"; ".join(shared): text for text, shared in names.items()}


def tuning() -> dict[str, Any]:
    """Tuning tables in use, with the provenance of their measurements."""
    import jax

    from jaxkv._src.tuning import all_reduce_table
    from jaxkv._src.tuning.copy_lookup import table_for
    from jaxkv._src.tuning.hardware import hardware_of

    device = jax.local_devices()[0]
    sums = all_reduce_table.table_for(device.device_kind)
    copies = table_for(device.device_kind, hardware_of(device))
    found = {"copies": copies.head, "all_reduce": vars(sums).copy()}
    found["all_reduce"]["rules"] = {
        f"{size} devices": [f"{name} from {min_bytes} bytes" for min_bytes, name in rules]
        for size, rules in sums.rules.items()
    }
    return found
