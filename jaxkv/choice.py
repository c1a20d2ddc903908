"""Which implementation serves a copy, decided while tracing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxkv import _native
from jaxkv.block_copy import BlockCopy
from jaxkv.host_ids import HostIds

IMPLEMENTATIONS = ("dma", "kernel", "pallas", "host")

# Measured on an H200, PCIe Gen5 x16: the copy engine overtakes the kernel from here on.
_DMA_MIN_RUN_BYTES = 64 * 1024
# The kernel saturates PCIe with this many SMs and is far from saturating HBM.
_HOST_LINK_SMS = 12
_HBM_SMS = 132


@dataclasses.dataclass(frozen=True)
class Choice:
    """What serves a call.

    Attributes:
      implementation: one of `IMPLEMENTATIONS`.
      num_sms: SMs that it may use.
      text: why this one, and why not each of the others.
    """

    implementation: str
    num_sms: int
    text: str


def choose(
    copy: BlockCopy,
    ids: tuple[Any, Any],
    implementation: str | None = None,
    overlapped: bool = False,
) -> Choice:
    """Decides while tracing.

    Raises:
      NotImplementedError: `implementation` can't serve the call, and why.
    """
    refusals = _refusals(ids)
    run = copy.geometry.run_bytes
    if implementation is not None:
        if implementation in refusals:
            raise NotImplementedError(
                f"{copy.operation}: implementation {implementation!r} does not serve this call: "
                f"{refusals[implementation]}"
            )
        chosen, why = implementation, "asked for"
    elif "host" not in refusals:
        chosen, why = "host", "the platform is cpu"
    elif "dma" not in refusals and run >= _DMA_MIN_RUN_BYTES:
        chosen, why = "dma", f"runs of {run} bytes, and the copy engine takes no SM"
    else:
        chosen, why = "kernel", f"runs of {run} bytes; ids may live on the device"
    others = {
        "dma": f"runs of {run} bytes are below {_DMA_MIN_RUN_BYTES}, where it falls behind kernel",
        "kernel": "it takes SMs that the copy engine does not",
    }
    lines = [f"{copy.operation}: {chosen} ({why})"]
    for other in IMPLEMENTATIONS:
        if other != chosen:
            lines.append(f"  not {other}: {refusals.get(other) or others.get(other, why)}")
    return Choice(chosen, _num_sms(copy), "\n".join(lines))


def _refusals(ids: tuple[Any, Any]) -> dict[str, str]:
    """Implementations that can't serve a call, and why."""
    platform = jax.default_backend()
    refusals = {"pallas": "its kernels, jaxkv/swap.py, are not wired in yet"}
    if platform == "cpu":
        refusals["dma"] = refusals["kernel"] = "the platform is cpu, it needs a CUDA device"
    else:
        refusals["host"] = f"the platform is {platform}, it copies on the CPU backend only"
        if not _native.extension().CUDA:
            refusals["kernel"] = refusals["dma"] = "jaxkv was built without CUDA"
        elif not all(isinstance(entry, HostIds) for entry in ids):
            refusals["dma"] = "the host writes its descriptors, so both id lists must be HostIds"
    return refusals


def _num_sms(copy: BlockCopy) -> int:
    spaces = {
        str(getattr(jax.typeof(array), "memory_space", ""))
        for array in (*copy.dense, *copy.strided)
    }
    return _HOST_LINK_SMS if any("Host" in space for space in spaces) else _HBM_SMS
