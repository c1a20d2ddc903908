"""The one FFI call under every page copy, and what decides which code serves it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv import _native
from jaxkv.host_ids import HostIds, num_ids_of
from jaxkv.layout import PageGeometry

IMPLEMENTATIONS = ("dma", "kernel", "pallas", "host")

# FFI target of each implementation. One name serves the CUDA kernel and its CPU twin, so that a
# call that leaves the choice open lowers for either platform.
TARGETS = {
    "kernel": "jaxkv_copy_blocks",
    "host": "jaxkv_copy_blocks",
    "dma": "jaxkv_copy_blocks_dma",
}

# Measured on an H200, PCIe Gen5 x16: the copy engine overtakes the kernel from here on.
_DMA_MIN_RUN_BYTES = 64 * 1024
# The kernel saturates PCIe with this many SMs and is far from saturating HBM.
_HOST_LINK_SMS = 12
_HBM_SMS = 132


@dataclasses.dataclass(frozen=True)
class BlockCopy:
    """Buffers that share a geometry: one FFI call.

    Attributes:
      operation: name of the public function, for messages and profiles.
      to_dense: direction; the dense arrays are written if True, else the strided ones.
      dense: one array for each buffer, each block of it contiguous.
      strided: one array for each buffer, or one that holds all buffers.
      geometry: how a block lies on the strided side.
      strided_offsets: bytes of each buffer's first block in its strided array.
      num_dense, num_strided: blocks on either side.
    """

    operation: str
    to_dense: bool
    dense: list[Any]
    strided: list[Any]
    geometry: PageGeometry
    strided_offsets: list[int]
    num_dense: int
    num_strided: int

    @property
    def written(self) -> list[Any]:
        """Arrays that the copy writes: the results alias them."""
        return self.dense if self.to_dense else self.strided

    @property
    def num_sources(self) -> int:
        """Blocks that a source id may name."""
        return self.num_strided if self.to_dense else self.num_dense

    @property
    def num_destinations(self) -> int:
        """Blocks that a destination id may name."""
        return self.num_dense if self.to_dense else self.num_strided


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation serves a call; `text` says why, and why not each of the others."""

    implementation: str
    text: str


def choose(copy: BlockCopy, ids: tuple[Any, Any], implementation: str | None = None) -> Choice:
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
    return Choice(chosen, "\n".join(lines))


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


def plan_pairs(copy: BlockCopy, ids: tuple[Any, Any]) -> Any:
    """Traces the check of the ids: int32[2 + 2n], the pairs that may be copied and their number."""
    operands, attributes = _id_operands(copy, ids)
    like = jax.typeof(copy.written[0])
    results = [
        _scratch_like(like, 2 + 2 * num_ids_of(ids[0])),
        _scratch_like(like, copy.num_destinations),
    ]
    pairs, _ = jax.ffi.ffi_call("jaxkv_plan_pairs", results)(*operands, **attributes)
    return pairs


def copy_blocks(
    copy: BlockCopy, ids: tuple[Any, Any], pairs: Any, implementation: str
) -> list[Any]:
    """Traces the copy; returns the written arrays.

    Args:
      copy: what to copy.
      ids: source and destination ids, which the copy engine reads.
      pairs: what `plan_pairs` made of them, which the others read.
      implementation: what serves the call.
    """
    operands: list[Any] = [pairs]
    attributes: dict[str, Any] = {}
    if implementation == "dma":
        operands, attributes = _id_operands(copy, ids)
    results = _result_types(copy)
    first_written = len(operands) + (len(copy.strided) if copy.to_dense else 0)
    geometry = copy.geometry
    call = jax.ffi.ffi_call(
        TARGETS[implementation],
        results,
        input_output_aliases={first_written + i: i for i in range(len(results))},
    )
    written = call(
        *operands,
        *copy.strided,
        *copy.dense,
        **attributes,
        to_dense=copy.to_dense,
        num_sms=np.int64(_num_sms(copy)),
        geometry=np.array(
            [
                geometry.block_bytes,
                geometry.run_bytes,
                *geometry.counts,
                *geometry.strides_bytes,
                geometry.page_stride_bytes,
                copy.num_dense,
                copy.num_strided,
            ],
            np.int64,
        ),
        strided_offsets=np.array(copy.strided_offsets, np.int64),
    )
    return list(written)


def _id_operands(copy: BlockCopy, ids: tuple[Any, Any]) -> tuple[list[Any], dict[str, Any]]:
    header = _native.extension().HOST_IDS_HEADER
    operands = [entry.data if isinstance(entry, HostIds) else jnp.asarray(entry) for entry in ids]
    headers = [header if isinstance(entry, HostIds) else 0 for entry in ids]
    return operands, {
        "source_header": np.int64(headers[0]),
        "destination_header": np.int64(headers[1]),
        "num_sources": np.int64(copy.num_sources),
        "num_destinations": np.int64(copy.num_destinations),
    }


def _result_types(copy: BlockCopy) -> list[Any]:
    """The types of the written arrays; a pool's type may have lost its memory space on the way."""
    types = [jax.typeof(array) for array in copy.written]
    if copy.operation == "store_pages":
        return [entry.update(memory_space=jax.memory.Space.Host) for entry in types]
    return types


def _scratch_like(result: Any, length: int) -> jax.ShapeDtypeStruct:
    """int32 device memory for the handler, varying over a mesh as the result does."""
    mesh = result.sharding.mesh
    return jax.ShapeDtypeStruct(
        (length,),
        jnp.int32,
        sharding=None if mesh.empty else NamedSharding(mesh, PartitionSpec(None)),
        manual_axis_type=result.manual_axis_type,
    )


def _num_sms(copy: BlockCopy) -> int:
    spaces = {
        str(getattr(jax.typeof(array), "memory_space", ""))
        for array in (*copy.dense, *copy.strided)
    }
    return _HOST_LINK_SMS if any("Host" in space for space in spaces) else _HBM_SMS
