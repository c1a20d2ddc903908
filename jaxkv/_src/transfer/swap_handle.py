"""Handles of in-flight swaps: their waits return arrays of `dst`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Self

import jax

from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.runtime.timeouts import checked_timeout_s
from jaxkv._src.transfer.async_calls import overlapped_copy, start_copy
from jaxkv._src.transfer.copy_handle import CopyHandle, Leaves, leaves_to_compute, undeleted
from jaxkv._src.transfer.dispatch import on_host
from jaxkv._src.transfer.ids import Ids, num_ids_of
from jaxkv._src.transfer.in_flight import keep_alive
from jaxkv._src.transfer.memory_kinds import check_memory_kinds
from jaxkv._src.transfer.resolve import PyTree, in_host_memory, prepare, resolve
from jaxkv._src.tuning.copy_table import Implementation


@jax.tree_util.register_pytree_node_class
class SwapHandle(CopyHandle):
    """An asynchronous copy of blocks in flight, returned by `start_swap`.

    A pytree. To wait in another program, pass it as a donated argument (JAX warns that the int32
    arrays of the handle were not usable, which is harmless):

        start = jax.jit(jaxkv.start_swap, donate_argnames="dst")
        finish = jax.jit(lambda swapping: swapping.wait(), donate_argnums=0)
        swapping = start(on_host, on_device, host_blocks, device_blocks)
        on_device = finish(swapping)

    The handle owns `dst`. If `dst` is in pinned host memory it also owns `src`, which a model would
    otherwise overwrite: donate both, and take `src` back from `.src`.
    """

    def __init__(
        self,
        src: PyTree | None,
        dst: PyTree,
        ticket: jax.Array | None = None,
        plan: jax.Array | None = None,
        *,
        to_host: bool = False,
    ) -> None:
        super().__init__(ticket, plan)
        # src is None in a swap to the device that was returned from the jit that started it.
        self._src, self._dst, self._to_host = src, dst, to_host
        self._src_waited = False

    @classmethod
    def _begin(
        cls,
        src: PyTree,
        dst: PyTree,
        ids: tuple[Ids, Ids],
        implementation: Implementation | None,
        timeout_s: float,
    ) -> Self:
        operation = "start_swap"
        timeout_s = checked_timeout_s(timeout_s, f"{operation}: timeout_s")
        call, traced = prepare(operation, (src, dst), ids, None, None, implementation)
        if not traced:
            with jax.disable_jit(False):  # a start requires a compiled program
                started = _begin_outside_jit(cls, src, dst, call.ids, implementation, timeout_s)
            started._src = src if started._src is None else started._src
            keep_alive((started._ticket, started._src))
            return started
        src, dst = call.state
        sources, destinations = jax.tree.leaves(src), jax.tree.leaves(dst)
        to_host = in_host_memory(operation, "dst", destinations)
        if to_host:  # `.src` is the result of one call
            in_host_memory(operation, "src", sources)
        started = cls(src, dst, to_host=to_host)
        started._timeout_s = timeout_s
        if not call.copies or num_ids_of(call.ids[0]) == 0:
            return started
        # Also around the source: waits extend the lifetime of the buffer that the copy reads.
        src, dst = fusion_barrier((src, dst))
        arrays, structure = jax.tree.flatten(dst)
        dst = jax.tree.unflatten(structure, check_memory_kinds(operation, arrays))
        call = resolve(operation, (src, dst), call.ids, None)
        block_bytes = call.copies[overlapped_copy(call.copies)].geometry.block_bytes
        started._segments = tuple(
            leaf
            for leaf, (a, b) in enumerate(zip(sources, destinations, strict=True))
            if a.size and b.size and b.nbytes == block_bytes * b.shape[0]
        )
        begun = start_copy(call, implementation, num_segments=len(started._segments))
        started._ticket, started._plan = begun.ticket, begun.plan
        started._src, started._dst = src, call.rebuild(begun.written)
        return started

    def wait(self, array: int | None = None, *, after: PyTree = None) -> PyTree:
        """Waits on the device for the copy of an array, or of all; the host does not block.

        Args:
          array: number of an array of `dst`, in the order of `jax.tree.leaves(dst)`, which is the
            order of the copy; None for all. One array or all, no sequence.
          after: pytree of arrays to compute before the wait, such as the input of a layer. Without
            it XLA may schedule the wait before compute that does not need the array.

        Returns:
          The array with the copied blocks; `dst` for None.

        Raises:
          TypeError: `array` is not an integer.
          ValueError: `dst` has no such array.
          NotImplementedError: called inside `jax.vmap`, or differentiated.
          RuntimeError: the handle was donated to a program, or belongs to another trace. Pass it to
            an inner jit or checkpoint as an argument and return it.
        """
        if array is None:
            self._wait_for(self._segments, after)
            return self._dst
        try:
            if isinstance(array, bool):
                raise TypeError("a bool is not an array number")
            array = operator.index(array)
        except TypeError as error:
            raise TypeError(
                "wait: array must be an integer, the number of an array of dst, or None for all, "
                f"got {array!r}"
            ) from error
        num_arrays = len(jax.tree.leaves(self._dst))
        if not 0 <= array < num_arrays:
            raise ValueError(
                f"wait: array must be in [0, {num_arrays}), the arrays of dst, got {array}"
            )
        self._wait_for([array], after)
        return jax.tree.leaves(self._dst)[array]

    @property
    def src(self) -> PyTree:
        """`src` after a wait for all arrays, of a swap into pinned host memory.

        Raises:
          RuntimeError: `dst` is in device memory, so that the handle does not own `src`.
        """
        if not self._to_host:
            raise RuntimeError(
                "src: the handle owns src only if dst is in pinned host memory; use the src that "
                "was passed to start_swap, and do not overwrite it before the wait"
            )
        if self._ticket is not None and not self._src_waited:
            sources, structure = jax.tree.flatten(self._src)
            from_host = on_host(sources[0])
            before = self._ticket
            waited = self._wait_call(
                sources,
                [],
                jax.tree.leaves(self._dst),
                like=None if from_host else sources[0],
                segment=len(self._segments) - 1,
                places=(),
            )
            self._ticket, *sources = (before, *waited) if from_host else waited
            self._src, self._src_waited = jax.tree.unflatten(structure, sources), True
            self._keep_alive(instead_of=before)
        return self._src

    def _wait_for(self, arrays: Sequence[int], after: PyTree) -> None:
        arrays = [i for i in arrays if i in self._segments and i not in self._waited]
        if self._ticket is None or not arrays:
            return
        before = self._ticket
        self._ticket, self._dst = self._wait_for_arrays(arrays, after)
        self._waited |= frozenset(arrays)
        self._keep_alive(instead_of=before)

    def _wait_for_arrays(
        self, arrays: Sequence[int], after: PyTree = None, *, boundary: bool = False
    ) -> tuple[Any, PyTree]:
        """The ticket and `dst` after a wait for some arrays."""
        destinations, structure = jax.tree.flatten(self._dst)
        sources = [] if self._src is None else jax.tree.leaves(self._src)
        sources = undeleted([sources[i] for i in arrays if sources])
        segments = tuple(self._segments.index(i) for i in arrays)
        waited = self._wait_call(
            [destinations[i] for i in arrays],
            # Past a boundary, later waits may have them no more.
            sources if boundary else [],
            [*([] if boundary else sources), *leaves_to_compute(after)],
            # XLA places all results of a call with results in host memory there.
            like=None if self._to_host else destinations[arrays[0]],
            segment=max(segments),
            # No address check at a pytree boundary, where XLA may copy an array.
            places=() if boundary else segments,
            boundary=segments if boundary else (),
        )
        ticket = self._ticket if self._to_host else waited.pop(0)
        for i, array in zip(arrays, waited, strict=True):
            destinations[i] = array
        return ticket, jax.tree.unflatten(structure, destinations)

    def _keep_alive(self, *, instead_of: jax.Array) -> None:
        """Keeps the arrays of a handle outside jit alive while the copy is in flight."""
        if not isinstance(instead_of, jax.core.Tracer):
            in_flight = len(self._waited) < len(self._segments) and not self._src_waited
            kept = (self._ticket, self._plan, self._src, self._dst)
            keep_alive(kept if in_flight else None, instead_of=instead_of)

    def _leaves(self) -> Leaves:
        # The written arrays first: JAX tries to reuse the memory of the first donated argument.
        return self._ticket, self._plan, self._dst, self._src if self._to_host else None

    def _leaves_past_boundary(self) -> Leaves:
        rest = [i for i in self._segments if i not in self._waited]
        ticket, plan, dst, src = self._leaves()
        if rest:
            ticket, dst = self._wait_for_arrays(rest, boundary=True)
        return ticket, plan, dst, src

    @classmethod
    def _of_leaves(cls, *leaves: Any) -> Self:
        ticket, plan, dst, src = leaves
        return cls(src, dst, ticket, plan)

    def _static(self) -> tuple[Any, ...]:
        return *super()._static(), self._to_host, self._src_waited

    def _with_static(self, static: tuple[Any, ...]) -> Self:
        *shared, self._to_host, self._src_waited = static
        return super()._with_static(tuple(shared))


# No donation: outside jit arrays are immutable, at the cost of a copy.
@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _begin_outside_jit(
    cls: type[SwapHandle],
    src: PyTree,
    dst: PyTree,
    ids: tuple[Ids, Ids],
    implementation: Implementation | None,
    timeout_s: float,
) -> SwapHandle:
    return cls._begin(src, dst, ids, implementation, timeout_s)
