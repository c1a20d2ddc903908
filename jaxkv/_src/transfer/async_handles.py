"""Handles of in-flight copies: pytrees whose waits return the arrays of the copy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Self

import jax

from jaxkv._src.cache.device_cache import DeviceCache
from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.runtime.sharding import check_unsharded
from jaxkv._src.runtime.timeouts import checked_timeout_s
from jaxkv._src.transfer import api, resolve
from jaxkv._src.transfer.async_calls import _start, _wait
from jaxkv._src.transfer.block_copy import plan_pairs
from jaxkv._src.transfer.buffer_lifetime import analysed
from jaxkv._src.transfer.dispatch import select_implementation
from jaxkv._src.transfer.ids import num_ids_of
from jaxkv._src.transfer.in_flight import Completion, check_same_trace, keep_alive


class _CopyHandle:
    """An in-flight copy: a pytree that owns the arrays of the copy."""

    def __init__(self, pool: Any, cache: Any, ticket: Any = None, plan: Any = None) -> None:
        # None in a load returned from the jit that started it: the pool is not a leaf.
        self._pool, self._cache = pool, cache
        # The ticket, int32[n], identifies the copy; None if there is nothing to wait for. The plan
        # has the validated pairs; None for the copy engine.
        self._ticket, self._plan = ticket, plan
        self._layers: tuple[int, ...] = ()  # in the order of the copy
        self._waited: frozenset[int] = frozenset()
        self._timeout_s = 0.0  # set by `_begin` or `tree_unflatten`
        self._completion = Completion()

    @classmethod
    def _begin(
        cls,
        operation: str,
        pool: HostPool,
        cache: DeviceCache,
        ids: tuple[resolve.Ids, resolve.Ids],
        layers: int | Sequence[int] | None,
        implementation: str | None,
        timeout_s: float,
    ) -> Self:
        timeout_s = checked_timeout_s(timeout_s)
        call, traced = resolve.prepare(operation, (pool, cache), ids, layers, implementation)
        if not traced:
            layers = api.static_layers(layers)
            with jax.disable_jit(False):  # a start requires a compiled program
                started = _begin_outside_jit(
                    cls, operation, pool, cache, call.ids, layers, implementation, timeout_s
                )
            started._pool = started._pool or pool
            return started
        started = cls(pool, cache)
        started._layers = cache.spec.select_layers(layers)
        started._timeout_s = timeout_s
        if not call.copies or num_ids_of(call.ids[0]) == 0:
            return started
        # Also around the source: waits extend the lifetime of the buffer that the copy reads.
        state = started._pool, started._cache = fusion_barrier((pool, cache))
        call = resolve.resolve(operation, state, call.ids, layers)
        (copy,) = call.copies
        selection = select_implementation(copy, call.ids, implementation, overlapped=True)
        with jax.named_scope(f"jaxkv.{operation}"):
            if selection.implementation != "dma":
                started._plan = plan_pairs(copy, call.ids)
            results = _start(copy, call.ids, started._plan, selection, cache.spec.num_kv)
        started._ticket, *written = analysed(results)
        state = call.rebuild([fusion_barrier(written)])
        if copy.to_dense:
            started._cache = state
        else:
            started._pool = state
            # XLA places all results of a call that writes host memory there. But waits read the
            # ticket in device memory, and a leaf that changes its memory space cannot be donated.
            (started._ticket,) = _wait(
                [], (started._ticket,), timeout_s=timeout_s, like=copy.dense[0]
            )
        return started

    def _written_positions(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Positions of the arrays of `layers` among the arrays that the copy writes."""
        raise NotImplementedError

    def wait(self, layer: int, *, after: Any = None) -> tuple[Any, ...]:
        """Waits on the device for the copy of a layer; the host does not block.

        Args:
          layer: number of a layer of the copy.
          after: pytree of arrays to compute before the wait, such as the input of the layer.
            Without it XLA may schedule the wait before compute that does not need the layer.

        Returns:
          The arrays of the layer, (k, v) or (latent,) as in `DeviceCache.layers`: after a load with
          the loaded pages, after a store free to be overwritten.

        Raises:
          ValueError: the layer is not part of the copy.
          RuntimeError: the handle belongs to another trace. Pass it to an inner jit or checkpoint
            as an argument and return it. Wait before a loop or branch: the pytree structure of a
            handle records the completed waits, and a loop carry has a fixed structure.
        """
        layer = operator.index(layer)
        if layer not in self._layers:
            raise ValueError(f"layer must be one that was started, {self._layers}, got {layer}")
        self._wait_for([layer], after)
        return self._cache.layers[layer]

    def done(self) -> bool:
        """Whether the entire copy is complete; the host does not block.

        Outside jit only, in any thread; requires no wait, and replaces none: JAX knows that the
        arrays are complete only after `wait`. True at the latest when all copies have completed
        that were started before the first query.

        Raises:
          RuntimeError: the handle is traced, or was donated to a program.
        """
        return self._completion.is_complete(self._ticket, jax.tree.leaves(self._leaves()))

    @property
    def cache(self) -> DeviceCache:
        """The `DeviceCache`, after a wait for all layers."""
        self._wait_for([layer for layer in self._layers if layer not in self._waited], None)
        return self._cache

    def _wait_for(self, layers: Sequence[int], after: Any) -> None:
        layers = [layer for layer in layers if layer not in self._waited]
        if self._ticket is None or not layers:
            return
        before = self._ticket
        self._ticket, self._cache = self._wait_for_layers(layers, after)
        self._waited |= frozenset(layers)
        if not isinstance(before, jax.core.Tracer):
            in_flight = len(self._waited) < len(self._layers)
            keep_alive(self._leaves() if in_flight else None, instead_of=before)

    def _wait_for_layers(
        self, layers: Sequence[int], after: Any = None, *, boundary: bool = False
    ) -> tuple[Any, DeviceCache]:
        """The ticket and the cache after a wait for some layers."""
        arrays = [array for layer in layers for array in self._cache.layers[layer]]
        segments = [self._layers.index(layer) for layer in layers]
        ticket, *arrays = self._wait_call(
            arrays,
            [self._pool.data] if self._pool else [],
            jax.tree.leaves(jax.tree.map(_without_gradient, after)),
            like=arrays[0],
            segment=max(segments),
            # No address check at a pytree boundary, where XLA may copy an array.
            places=() if boundary else self._written_positions(layers),
            boundary=tuple(s for s in segments for _ in range(self._cache.spec.num_kv))
            if boundary
            else (),
        )
        rest = iter(arrays)
        new = {layer: tuple(next(rest) for _ in self._cache.layers[layer]) for layer in layers}
        halves = tuple(new.get(layer, old) for layer, old in enumerate(self._cache.layers))
        return ticket, dataclasses.replace(self._cache, layers=halves)

    def _wait_call(
        self, arrays: list[Any], kept: list[Any], after: list[Any], **options: Any
    ) -> list[Any]:
        """Waits; returns the next ticket, if any, and the arrays."""
        kept = kept if self._plan is None else [self._plan, *kept]
        operands = (self._ticket, *kept, *after)
        check_unsharded((*operands, *arrays))
        run = _wait
        if not any(isinstance(operand, jax.core.Tracer) for operand in (*operands, *arrays)):
            run = _wait_donated if options["places"] else _wait_undonated
        last = len(self._layers) - 1
        keywords = {"timeout_s": self._timeout_s, "kept": len(kept), "last": last, **options}
        # Outside jit a wait is jitted, also under `disable_jit`: XLA copies the operands of an
        # operation executed eagerly.
        with contextlib.nullcontext() if run is _wait else jax.disable_jit(False):
            waited = run(arrays, operands, **keywords)
        check_same_trace(self._ticket, waited[0])
        return waited

    def _leaves(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _leaves_past_boundary(self) -> tuple[Any, ...]:
        """The leaves after a wait that is removed if the program waits for them later."""
        raise NotImplementedError

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        traced = isinstance(self._ticket, jax.core.Tracer)
        leaves = self._leaves_past_boundary() if traced else self._leaves()
        return leaves, (self._layers, self._waited, self._timeout_s)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: tuple[Any, ...]) -> Self:
        started = cls._of_leaves(*leaves)
        started._layers, started._waited, started._timeout_s = static
        keep_alive(leaves)
        return started

    @classmethod
    def _of_leaves(cls, *leaves: Any) -> Self:
        raise NotImplementedError


@jax.tree_util.register_pytree_node_class
class LoadHandle(_CopyHandle):
    """An asynchronous load in flight, returned by `start_load`.

    A pytree. To wait in another program, pass it as a donated argument (JAX warns that the int32
    arrays of the handle were not usable, which is harmless):

        start = jax.jit(jaxkv.start_load, donate_argnames="cache")
        finish = jax.jit(lambda loading: loading.cache, donate_argnums=0)
        loading = start(pool, cache, host_pages, device_pages)
        cache = finish(loading)
    """

    def _written_positions(self, layers: Sequence[int]) -> tuple[int, ...]:
        halves = self._cache.spec.num_kv
        starts = (self._layers.index(layer) * halves for layer in layers)
        return tuple(start + half for start in starts for half in range(halves))

    def _leaves(self) -> tuple[Any, ...]:
        return self._ticket, self._plan, self._cache

    def _leaves_past_boundary(self) -> tuple[Any, ...]:
        rest = [layer for layer in self._layers if layer not in self._waited]
        if not rest:
            return self._leaves()
        ticket, cache = self._wait_for_layers(rest, boundary=True)
        return ticket, self._plan, cache

    @classmethod
    def _of_leaves(cls, *leaves: Any) -> Self:
        ticket, plan, cache = leaves
        return cls(None, cache, ticket, plan)


@jax.tree_util.register_pytree_node_class
class StoreHandle(_CopyHandle):
    """An asynchronous store in flight, returned by `start_store`.

    A pytree. To wait in another program, pass it as a donated argument (JAX warns that the int32
    arrays of the handle were not usable, which is harmless):

        start = jax.jit(jaxkv.start_store, donate_argnames=("pool", "cache"))
        finish = jax.jit(lambda storing: (storing.pool, storing.cache), donate_argnums=0)
        storing = start(pool, cache, host_pages, device_pages)
        pool, cache = finish(storing)
    """

    @property
    def pool(self) -> HostPool:
        """The `HostPool`, after a wait for all pages."""
        if self._ticket is not None:
            self._pool = self._waited_pool()
            before, self._ticket = self._ticket, None
            if not isinstance(before, jax.core.Tracer):
                keep_alive(None, instead_of=before)
        return self._pool

    def _waited_pool(self, *, boundary: bool = False) -> HostPool:
        # Excludes completed layers: XLA would copy an array that was overwritten in the meantime.
        reading = [layer for layer in self._layers if layer not in self._waited]
        last = len(self._layers) - 1
        (data,) = self._wait_call(
            [self._pool.data],
            [array for layer in reading for array in self._cache.layers[layer]],
            [],
            like=None,
            segment=last,
            places=() if boundary else (0,),
            boundary=(last,) if boundary else (),
        )
        return dataclasses.replace(self._pool, data=data)

    def _written_positions(self, layers: Sequence[int]) -> tuple[int, ...]:
        return ()

    def _leaves(self) -> tuple[Any, ...]:
        return self._ticket, self._plan, self._cache, self._pool

    def _leaves_past_boundary(self) -> tuple[Any, ...]:
        return self._ticket, self._plan, self._cache, self._waited_pool(boundary=True)

    @classmethod
    def _of_leaves(cls, *leaves: Any) -> Self:
        ticket, plan, cache, pool = leaves
        return cls(pool, cache, ticket, plan)


# No donation: outside jit arrays are immutable, at the cost of a copy.
@functools.partial(jax.jit, static_argnums=(0, 1, 5, 6, 7))
def _begin_outside_jit(
    cls: type[_CopyHandle],
    operation: str,
    pool: HostPool,
    cache: DeviceCache,
    ids: tuple[resolve.Ids, resolve.Ids],
    layers: tuple[int, ...] | None,
    implementation: str | None,
    timeout_s: float,
) -> Any:
    return cls._begin(operation, pool, cache, ids, layers, implementation, timeout_s)


_STATIC = ("timeout_s", "segment", "places", "kept", "last", "boundary")
_wait_undonated = jax.jit(_wait, static_argnames=_STATIC)
_wait_donated = jax.jit(_wait, static_argnames=_STATIC, donate_argnums=0)


def _without_gradient(leaf: Any) -> Any:
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.core.Tracer) else leaf
