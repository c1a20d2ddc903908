"""Properties of a GPU on which the rates of copies depend."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

from jaxkv._src.runtime import devices, native, pcie
from jaxkv._src.runtime.pcie import PcieLink


class Hardware(NamedTuple):
    """Properties of a GPU.

    Attributes:
      compute_capability: such as "9.0".
      num_sms: SMs of the device.
      pcie_generation: generation of its link to the host, or None if unknown.
      pcie_lanes: lanes of that link, or None if unknown.
    """

    compute_capability: str
    num_sms: int
    pcie_generation: int | None = None
    pcie_lanes: int | None = None

    @property
    def major(self) -> str:
        """The major compute capability."""
        return self.compute_capability.split(".")[0]

    @property
    def link(self) -> PcieLink | None:
        """The link to the host, or None if unknown."""
        if self.pcie_generation is None or self.pcie_lanes is None:
            return None
        return PcieLink(self.pcie_generation, self.pcie_lanes)


@functools.cache
def hardware_of(device: jax.Device) -> Hardware | None:
    """The properties of a CUDA GPU, or None for other devices; a few milliseconds, once."""
    if devices.platform_of(device) != "gpu":
        return None
    extension = native.extension()
    link = pcie.link_of(extension.pci_address(device.local_hardware_id)) if extension.CUDA else None
    generation, lanes = link or (None, None)
    return Hardware(str(device.compute_capability), device.core_count, generation, lanes)
