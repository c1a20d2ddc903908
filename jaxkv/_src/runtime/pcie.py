"""The PCIe link of a GPU, from NVML or from sysfs; neither creates a CUDA context."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

# MB/s (1e6 bytes) per lane and direction, by generation, after the encoding of the line.
LANE_MB_PER_S = {1: 250, 2: 500, 3: 985, 4: 1969, 5: 3938, 6: 7563}
_GT_PER_S = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_SYSFS = Path("/sys/bus/pci/devices")


class PcieLink(NamedTuple):
    """Generation and number of lanes, of the fastest link that device and slot support.

    An idle link runs at a lower generation, hence not the present one.
    """

    generation: int
    lanes: int

    @property
    def mb_per_s(self) -> int:
        """MB/s (1e6 bytes) in one direction, packet headers included."""
        return LANE_MB_PER_S[self.generation] * self.lanes

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.lanes}"


def link_of(address: str) -> PcieLink | None:
    """The link of the device with a PCI address, or None if neither source knows it."""
    for source in (_from_nvml, _from_sysfs):
        try:
            link = source(address)
        except (OSError, ValueError, AttributeError):
            continue
        if link.generation in LANE_MB_PER_S and link.lanes > 0:
            return link
    return None


def _from_nvml(address: str, library: Any = None) -> PcieLink:
    """NVML knows the limit of the slot, and in a virtual machine that of the physical device."""
    nvml = library or ctypes.CDLL("libnvidia-ml.so.1")

    def call(function: str, *arguments: object) -> None:
        if code := getattr(nvml, function)(*arguments):
            raise OSError(f"{function}: error {code}")

    def number(function: str, handle: ctypes.c_void_p) -> int:
        value = ctypes.c_uint()
        call(function, handle, ctypes.byref(value))
        return value.value

    call("nvmlInit_v2")
    try:
        handle = ctypes.c_void_p()
        call("nvmlDeviceGetHandleByPciBusId_v2", address.encode(), ctypes.byref(handle))
        return PcieLink(
            number("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            number("nvmlDeviceGetMaxPcieLinkWidth", handle),
        )
    finally:
        call("nvmlShutdown")


def _from_sysfs(address: str) -> PcieLink:
    device = (_SYSFS / address.lower()).resolve()
    ends = [_link_at(device)]
    if (device.parent / "max_link_speed").exists():  # the slot
        ends.append(_link_at(device.parent))
    return PcieLink(min(end.generation for end in ends), min(end.lanes for end in ends))


def _link_at(folder: Path) -> PcieLink:
    speed = (folder / "max_link_speed").read_text().split()[0]  # "32.0 GT/s PCIe"
    return PcieLink(_GT_PER_S.get(speed, 0), int((folder / "max_link_width").read_text()))
