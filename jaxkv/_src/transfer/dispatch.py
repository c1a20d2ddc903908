"""Dispatch of a copy: its implementation and number of SMs, selected while tracing.

Implementations that do not support the call are excluded. The tuning table of the device
(`copy_lookup`) ranks the others by direction, alignment, contiguous bytes and payload.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._src.runtime import devices, native
from jaxkv._src.transfer import pallas_chunks
from jaxkv._src.transfer.block_copy import BlockCopy
from jaxkv._src.transfer.ids import HostIds, IdPair, num_ids_of
from jaxkv._src.tuning import copy_lookup, copy_table
from jaxkv._src.tuning.copy_table import IMPLEMENTATIONS, Candidate, CopySize, Implementation
from jaxkv._src.tuning.hardware import Hardware, hardware_of

# A descriptor costs about 1 us of host time (bench/dispatch.py). The limit bounds it to a few
# milliseconds per step. The kernel is hardly slower, and its host time does not depend on the
# number of pages.
MAX_DESCRIPTORS = 4096
# In a step, the copy engine then needs 6 to 10 us and the kernel 9 to 11 (`small_batches` of
# bench/transfer.py). The tuning tables are of copies that follow one another.
FEW_DESCRIPTORS = 4


@dataclasses.dataclass(frozen=True)
class Selection:
    """The implementation of a call.

    Attributes:
      implementation: one of `IMPLEMENTATIONS`.
      num_sms: SM limit; 0 for implementations without a kernel.
      text: reasons for the selection and against each of the other implementations.
    """

    implementation: Implementation
    num_sms: int
    text: str


def select_implementation(
    copy: BlockCopy,
    ids: IdPair,
    implementation: Implementation | None = None,
    *,
    overlapped: bool = False,
) -> Selection:
    """Selects the implementation of a copy while tracing.

    Args:
      copy: the buffers to copy.
      ids: source and destination ids.
      implementation: the requested implementation, or None for the best supported one.
      overlapped: whether the copy is asynchronous, on a copy stream.

    Raises:
      ValueError: unknown implementation, or invalid tuning table.
      NotImplementedError: the requested implementation, or every one, does not support the call;
        the message has the reasons.
    """
    check_implementation_name(implementation, f"{copy.operation}: implementation")
    machine = _machine()
    forced = _forced_implementation.get() if implementation is None else None
    requested = forced.implementation if forced else implementation
    unsupported = _unsupported_reasons(machine, copy, ids, requested, overlapped)
    if requested in unsupported:
        raise NotImplementedError(
            f"{copy.operation}: implementation {requested!r} does not support this call: "
            f"{unsupported[requested]}"
        )
    table = copy_lookup.table_for(machine.device_kind, machine.hardware)
    situation = "overlapped" if overlapped else _direction(copy)
    rule = table.rule(situation, _size(copy, ids))
    ranked = _ranked(rule, copy_lookup.default_table().rule(situation, rule.minima))
    few = requested is None and _has_few_descriptors(copy, ids, unsupported, overlapped)
    chosen = _best(copy, ranked, unsupported, "dma" if few else requested)
    if forced and chosen.num_sms and forced.num_sms != chosen.num_sms:
        chosen = Candidate(chosen.implementation, forced.num_sms)
    elif chosen.implementation == "pallas" and machine.platform == "cpu":
        chosen = Candidate("pallas", 1)  # the interpreter takes seconds per SM
    reason, against = "best supported", None
    if requested:
        reason, against = "requested", "another implementation was requested"
    elif few:
        reason = f"lowest latency of up to {FEW_DESCRIPTORS} descriptors"
        against = "higher latency"
    if chosen.implementation == "xla":
        if not requested:
            reason = f"fallback: the platform is {machine.platform}, which has no CUDA handlers"
        if overlapped:
            reason += "; not overlapped: the copy is complete at its start"
    text = _explain(copy, chosen, ranked, unsupported, (reason, against), rule.measured)
    basis = f"  by {table.source}: {situation}, {_from_text(rule.minima)}"
    return Selection(chosen.implementation, chosen.num_sms, f"{text}\n{basis}")


def _best(
    copy: BlockCopy,
    ranked: list[Candidate],
    unsupported: dict[Implementation, str],
    wanted: Implementation | None,
) -> Candidate:
    """The wanted implementation, or the first one that supports the call."""
    for candidate in ranked:
        name = candidate.implementation
        if name == wanted or (wanted is None and name not in unsupported):
            return candidate
    reasons = "; ".join(f"{name}: {reason}" for name, reason in unsupported.items())
    raise NotImplementedError(f"{copy.operation}: no implementation supports this call: {reasons}")


def check_implementation_name(
    implementation: Implementation | None, name: str = "implementation"
) -> None:
    """Raises ValueError unless it is None or one of `IMPLEMENTATIONS`."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{name} must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )


@contextlib.contextmanager
def force_implementation(implementation: Implementation, num_sms: int = 0) -> Iterator[None]:
    """Context in which calls with `implementation=None` use this one; for measurements.

    Affects only calls that are traced in the context, not programs compiled before.

    Args:
      implementation: one of `IMPLEMENTATIONS`; unsupported calls raise NotImplementedError.
      num_sms: number of SMs; ignored for "dma", "host" and "xla".

    Raises:
      ValueError: unknown implementation, or fewer than 1 SM for one that runs on SMs.
    """
    check_implementation_name(implementation)
    if implementation in copy_table.ON_SMS and num_sms < 1:
        raise ValueError(f"num_sms must be >= 1 for {implementation!r}, got {num_sms}")
    token = _forced_implementation.set(Candidate(implementation, num_sms))
    try:
        yield
    finally:
        _forced_implementation.reset(token)


_forced_implementation: contextvars.ContextVar[Candidate | None] = contextvars.ContextVar(
    "forced", default=None
)


class Machine(NamedTuple):
    """Properties of the machine that the dispatch depends on; replaced in tests.

    Attributes:
      platform: as `devices.platform_of`.
      device_kind: JAX's device kind.
      has_cuda_handlers: whether jaxkv was built with CUDA.
      hardware: of a CUDA GPU whose kind has no tuning table; otherwise None.
    """

    platform: str
    device_kind: str
    has_cuda_handlers: bool
    hardware: Hardware | None = None


def _machine() -> Machine:
    device = jax.local_devices()[0]
    kind = device.device_kind
    hardware = None if copy_lookup.is_packaged(kind) else hardware_of(device)
    return Machine(devices.platform_of(device), kind, native.extension().CUDA, hardware)


def _unsupported_reasons(
    machine: Machine,
    copy: BlockCopy,
    ids: IdPair,
    requested: Implementation | None,
    overlapped: bool,
) -> dict[Implementation, str]:
    """Implementations that do not support a call, with the reasons."""
    unsupported: dict[Implementation, str] = {}
    if reason := _xla_unsupported_reason(machine, copy, requested):
        unsupported["xla"] = reason
    if machine.platform != "cpu":
        unsupported["host"] = f"CPU backend only, the platform is {machine.platform}"
    if machine.platform != "gpu":
        reason = f"requires a CUDA device, the platform is {machine.platform}"
        unsupported["dma"] = unsupported["kernel"] = reason
    else:
        if not machine.has_cuda_handlers:
            unsupported["dma"] = unsupported["kernel"] = "jaxkv was built without CUDA"
        elif not all(isinstance(entry, HostIds) for entry in ids):
            unsupported["dma"] = (
                "requires HostIds for both id lists: the host writes the descriptors"
            )
        elif requested != "dma" and (count := _descriptors(copy, ids)) > MAX_DESCRIPTORS:
            unsupported["dma"] = (
                f"up to {count} descriptors written by the host, the limit is {MAX_DESCRIPTORS} "
                "unless requested"
            )
    if reason := _pallas_unsupported_reason(machine, copy, ids, requested, overlapped):
        unsupported["pallas"] = reason
    return unsupported


def _xla_unsupported_reason(
    machine: Machine, copy: BlockCopy, requested: Implementation | None
) -> str | None:
    if machine.platform in ("cpu", "gpu") and requested != "xla":
        return "slower than the handlers of jaxkv: only if requested"
    largest = max(max(array.shape) for array in (*copy.dense, *copy.strided))
    if largest > (limit := np.iinfo(np.int32).max):
        return f"an array has an axis of {largest} elements, the limit of int32 indices is {limit}"
    return None


def _has_few_descriptors(
    copy: BlockCopy, ids: IdPair, unsupported: dict[Implementation, str], overlapped: bool
) -> bool:
    """Whether the copy engine has the lowest latency; asynchronous copies hide it."""
    if overlapped or "dma" in unsupported or _direction(copy) == "device":
        return False
    return _descriptors(copy, ids) <= FEW_DESCRIPTORS


def _descriptors(copy: BlockCopy, ids: IdPair) -> int:
    """Upper bound of the descriptors; the ids, which allow merging, are not known yet."""
    runs = copy.geometry.block_bytes // copy.geometry.run_bytes
    return num_ids_of(ids[0]) * copy.num_buffers * runs


def _pallas_unsupported_reason(
    machine: Machine,
    copy: BlockCopy,
    ids: IdPair,
    requested: Implementation | None,
    overlapped: bool,
) -> str | None:
    if overlapped:
        return "XLA runs Pallas kernels on its own stream, without overlap"
    if machine.platform == "cpu":
        if requested != "pallas":
            return "interpreted on platform cpu, which is slow: only if requested"
        if _direction(copy) != "device":
            return "its interpreter on platform cpu supports device memory only"
    elif machine.platform != "gpu":
        return f"requires a CUDA device, the platform is {machine.platform}"
    elif not machine.has_cuda_handlers:
        return "jaxkv was built without CUDA, which the id check requires"
    return pallas_chunks.unsupported_reason(copy, num_ids_of(ids[0]))


def _direction(copy: BlockCopy) -> str:
    # By name if possible: the type of a traced pool may lack its memory space.
    for direction in ("load", "store"):
        if direction in copy.operation:
            return direction
    sources, destinations = copy.strided, copy.dense
    if not copy.to_dense:
        sources, destinations = destinations, sources
    if any(map(on_host, destinations)):
        return "store"
    return "load" if any(map(on_host, sources)) else "device"


def on_host(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is in host memory, according to its type."""
    if isinstance(array, jax.ShapeDtypeStruct):  # its type has no memory space
        return getattr(array.sharding, "memory_kind", None) == "pinned_host"
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def _size(copy: BlockCopy, ids: IdPair) -> CopySize:
    geometry = copy.geometry
    return CopySize(
        word_bytes=math.gcd(
            16,
            geometry.run_bytes,
            *geometry.strides_bytes,
            geometry.page_stride_bytes,
            geometry.dense_stride_bytes,
            *copy.strided_offsets,
            *copy.dense_offsets,
        ),
        run_bytes=geometry.run_bytes,
        total_bytes=num_ids_of(ids[0]) * copy.num_buffers * geometry.block_bytes,
    )


def _ranked(rule: copy_table.Rule, default: copy_table.Rule) -> list[Candidate]:
    """The candidates of a rule, then those that only the default table has."""
    named = {candidate.implementation for candidate in rule.candidates}
    others = [entry for entry in default.candidates if entry.implementation not in named]
    return [*rule.candidates, *others]


def _explain(
    copy: BlockCopy,
    chosen: Candidate,
    ranked: list[Candidate],
    unsupported: dict[Implementation, str],
    reasons: tuple[str, str | None],
    measured: CopySize | None,
) -> str:
    reason, reason_against = reasons
    details = ", ".join(filter(None, (reason, _figures(chosen, measured))))
    lines = [f"{copy.operation}: {chosen.implementation} ({details})"]
    by_name = {candidate.implementation: candidate for candidate in ranked}
    for name in IMPLEMENTATIONS:
        if name != chosen.implementation:
            against = unsupported.get(name) or _comparison(
                chosen, by_name[name], reason_against, measured
            )
            lines.append(f"  not {name}: {against}")
    return "\n".join(lines)


def _comparison(
    chosen: Candidate, other: Candidate, reason: str | None, measured: CopySize | None
) -> str:
    if reason:
        pass
    elif measured is None or other.gb_per_s is None or chosen.gb_per_s is None:
        reason = "lower rank in the table"
    elif other.gb_per_s <= chosen.gb_per_s:
        reason = "not faster"
    else:
        reason = "similar throughput on more SMs"
    return ", ".join(filter(None, (reason, _figures(other, measured))))


def _figures(candidate: Candidate, measured: CopySize | None) -> str:
    """SMs, and the rate with its size: that of a call of another size can differ by far."""
    if measured is None or candidate.gb_per_s is None:
        return candidate._replace(gb_per_s=None).figures
    return f"{candidate.figures} at {measured.runs_text}"


def _from_text(minima: CopySize) -> str:
    names = ("words", "runs", "payload")
    parts = [
        f"{name} of {minimum} bytes or more"
        for minimum, smallest, name in zip(minima, copy_table.SMALLEST, names, strict=True)
        if minimum > smallest
    ]
    return ", ".join(parts) or "any size"
