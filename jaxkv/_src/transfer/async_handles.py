"""Handles of in-flight page copies: their waits return the arrays of a layer."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.cache.array_cache import ArrayCache, engine_arrays, is_stacked, layer_arrays
from jaxkv._src.cache.device_cache import DeviceCache
from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.runtime.timeouts import checked_timeout_s
from jaxkv._src.transfer import api, resolve
from jaxkv._src.transfer.async_calls import overlapped_copy, start_copy
from jaxkv._src.transfer.copy_handle import CopyHandle, Leaves, leaves_to_compute, undeleted
from jaxkv._src.transfer.ids import Ids, num_ids_of
from jaxkv._src.transfer.in_flight import keep_alive
from jaxkv._src.transfer.page_copies import arrays_of_copies, by_layer
from jaxkv._src.tuning.copy_table import Implementation


class _PageCopyHandle(CopyHandle):
    """An in-flight copy of pages; its segments are layers."""

    def __init__(
        self,
        pool: HostPool | None,
        cache: DeviceCache | ArrayCache,
        ticket: jax.Array | None = None,
        plan: jax.Array | None = None,
    ) -> None:
        super().__init__(ticket, plan)
        # None in a load returned from the jit that started it: the pool is not a leaf.
        self._pool, self._cache = pool, cache
        self._arrays: tuple[int, ...] = ()  # of a layer, that are in flight

    @classmethod
    def _begin(
        cls,
        operation: str,
        pool: HostPool,
        engine_cache: resolve.PyTree,
        ids: tuple[Ids, Ids],
        layers: int | Sequence[int] | None,
        tokens: range | None,
        implementation: Implementation | None,
        timeout_s: float,
    ) -> Self:
        timeout_s = checked_timeout_s(timeout_s, f"{operation}: timeout_s")
        cache = by_layer(operation, pool, engine_cache)
        call, traced = resolve.prepare(
            operation, (pool, cache), ids, layers, tokens, implementation
        )
        if not traced:
            layers = api.static_layers(layers)
            with jax.disable_jit(False):  # a start requires a compiled program
                started = _begin_outside_jit(
                    cls, operation, pool, cache, call.ids, layers, tokens, implementation, timeout_s
                )
            if started._pool is None:  # of a load
                started._pool = pool
                keep_alive((started._ticket, pool))
            return started
        started = cls(pool, cache)
        started._segments = cache.spec.select_layers(layers)
        started._timeout_s = timeout_s
        if not call.copies or num_ids_of(call.ids[0]) == 0:
            return started
        # Also around the source: waits extend the lifetime of the buffer that the copy reads.
        state = started._pool, started._cache = fusion_barrier(call.state)
        call = resolve.resolve(operation, state, call.ids, layers, tokens)
        started._arrays = arrays_of_copies(pool, tokens)[overlapped_copy(call.copies)]
        begun = start_copy(call, implementation, num_segments=len(started._segments))
        started._ticket, started._plan = begun.ticket, begun.plan
        return started._with(call.rebuild(begun.written))

    def _with(self, written: HostPool | DeviceCache | ArrayCache) -> Self:
        """The handle with the written pool or cache."""
        if isinstance(written, HostPool):
            self._pool = written
        else:
            self._cache = written
        return self

    def _written_positions(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Positions of the arrays of `layers` among the arrays that the copy writes."""
        raise NotImplementedError

    def wait(
        self, layer: int | Sequence[int] | np.ndarray | jax.Array, *, after: resolve.PyTree = None
    ) -> resolve.PyTree:
        """Waits on the device for the copy of a layer; the host does not block.

        Each wait is a kernel. One wait may serve several layers, the first of which is then used
        only when the last one has been copied:

            for first in range(0, num_layers, 4):
                for k, v in loading.wait(range(first, first + 4), after=x):
                    x = attention(x, k, v)

        Args:
          layer: number of a layer of the copy, or a sequence or NumPy array of them, such as a
            range. For stacked arrays also a traced integer scalar, as in the body of `lax.scan`
            over layers, with the handle in its carry; it is clamped.
          after: pytree of arrays to compute before the wait, such as the input of the layer.
            Without it XLA may schedule the wait before compute that does not need the layer.

        Returns:
          The arrays of the layer, (k, v) or (latent,) as in `DeviceCache.layers`, or the pytree of
          an engine's layer; of stacked arrays, those of all layers. After a load they have the
          loaded pages of the layer, after a store they may be overwritten. A tuple of these for a
          sequence.

        Raises:
          ValueError: a layer is not part of the copy, or it is traced and the copy is not of all
            layers in order.
          TypeError: the layer is not an integer, or it is traced and the arrays are not stacked.
          NotImplementedError: called inside `jax.vmap`, or differentiated.
          RuntimeError: the handle was donated to a program, or belongs to another trace. Pass it to
            an inner jit or checkpoint as an argument and return it. Wait for a static layer before
            a loop or branch: the pytree structure of a handle records these waits, and a loop carry
            has a fixed one.
        """
        if isinstance(layer, jax.core.Tracer):
            return self._wait_for_traced(layer, after)
        layers, several = _layer_numbers(layer)
        for number in layers:
            if number not in self._segments:
                raise ValueError(
                    f"wait: layer must be one of the copied layers {list(self._segments)}, got "
                    f"{number}; the argument layers of the start selects them"
                )
        self._wait_for(layers, after)
        arrays = tuple(map(self._layer_arrays, layers))
        return arrays if several else arrays[0]

    def _layer_arrays(self, layer: int) -> resolve.PyTree:
        if isinstance(self._cache, ArrayCache):
            return layer_arrays(self._cache, layer)
        return self._cache.layers[layer]

    def _wait_for_traced(self, layer: jax.Array, after: Any) -> Any:
        """The stacked arrays after a wait for a layer whose number is on the device."""
        _check_traced_layer(layer)
        cache = self._cache
        if not isinstance(cache, ArrayCache) or not cache.spec.stacked:
            raise TypeError(
                "wait: layer must be a static integer: only stacked arrays "
                "(ArrayCacheSpec.from_arrays(..., stacked=True)) can be indexed by a traced layer"
            )
        if self._segments != tuple(range(cache.spec.num_layers)):
            raise ValueError(
                f"wait: a traced layer requires a copy of all {cache.spec.num_layers} layers in "
                f"order, got layers {list(self._segments)}"
            )
        last = cache.spec.num_layers - 1
        if self._ticket is not None and len(self._waited) < len(self._segments):
            if layer.dtype != np.int32:  # clamped before the conversion
                layer = jnp.clip(layer, 0, min(last, jnp.iinfo(layer.dtype).max)).astype(np.int32)
            self._ticket, self._cache = self._wait_for_layers([last], after, traced_layer=layer)
        return self._layer_arrays(0)

    @property
    def cache(self) -> Any:
        """The `DeviceCache`, or the engine's arrays, after a wait for all layers."""
        self._wait_for([layer for layer in self._segments if layer not in self._waited], None)
        if isinstance(self._cache, ArrayCache):
            return engine_arrays(self._cache)
        return self._cache

    def _wait_for(self, layers: Sequence[int], after: resolve.PyTree) -> None:
        layers = [layer for layer in dict.fromkeys(layers) if layer not in self._waited]
        if self._ticket is None or not layers:
            return
        before = self._ticket
        self._ticket, self._cache = self._wait_for_layers(layers, after)
        self._waited |= frozenset(layers)
        if not isinstance(before, jax.core.Tracer):
            in_flight = len(self._waited) < len(self._segments)
            keep_alive(self._leaves() if in_flight else None, instead_of=before)

    def _wait_for_layers(
        self,
        layers: Sequence[int],
        after: resolve.PyTree = None,
        *,
        boundary: bool = False,
        traced_layer: jax.Array | None = None,
    ) -> tuple[jax.Array, DeviceCache | ArrayCache]:
        """The ticket and the cache after a wait for some layers."""
        stacked = is_stacked(self._cache)
        rows = [0] if stacked else layers
        places = [(row, array) for row in rows for array in self._arrays]
        segments = [self._segments.index(layer) for layer in layers]
        if stacked:
            segments = [max(segments)]
        in_flight = [self._cache.layers[row][array] for row, array in places]
        ticket, *arrays = self._wait_call(
            in_flight,
            undeleted([self._pool.data]) if self._pool else [],
            leaves_to_compute(after),
            traced_segment=traced_layer,
            like=in_flight[0],
            segment=max(segments),
            # No address check at a pytree boundary, where XLA may copy an array.
            places=() if boundary else self._written_positions(layers),
            boundary=tuple(s for s in segments for _ in self._arrays) if boundary else (),
        )
        new = dict(zip(places, arrays, strict=True))
        waited = tuple(
            tuple(new.get((row, index), array) for index, array in enumerate(old))
            for row, old in enumerate(self._cache.layers)
        )
        return ticket, dataclasses.replace(self._cache, layers=waited)

    def _static(self) -> tuple[Any, ...]:
        return *super()._static(), self._arrays

    def _with_static(self, static: tuple[Any, ...]) -> Self:
        *shared, self._arrays = static
        return super()._with_static(tuple(shared))


@jax.tree_util.register_pytree_node_class
class LoadHandle(_PageCopyHandle):
    """An asynchronous load in flight, returned by `start_load`.

    A pytree. To wait in another program, pass it as a donated argument (JAX warns that the int32
    arrays of the handle were not usable, which is harmless):

        start = jax.jit(jaxkv.start_load, donate_argnames="cache")
        finish = jax.jit(lambda loading: loading.cache, donate_argnums=0)
        loading = start(pool, cache, host_pages, device_pages)
        cache = finish(loading)
    """

    @classmethod
    def idle(cls, cache: DeviceCache) -> Self:
        """A handle without a copy, whose waits return the layers."""
        handle = cls(None, cache)
        handle._segments = tuple(range(cache.spec.num_layers))
        return handle

    def _written_positions(self, layers: Sequence[int]) -> tuple[int, ...]:
        count = len(self._arrays)
        if is_stacked(self._cache):
            return tuple(range(count))
        starts = (self._segments.index(layer) * count for layer in layers)
        return tuple(start + array for start in starts for array in range(count))

    def _leaves(self) -> Leaves:
        return self._ticket, self._plan, self._cache

    def _leaves_past_boundary(self) -> Leaves:
        rest = [layer for layer in self._segments if layer not in self._waited]
        if not rest:
            return self._leaves()
        ticket, cache = self._wait_for_layers(rest, boundary=True)
        return ticket, self._plan, cache

    @classmethod
    def _of_leaves(cls, *leaves: Any) -> Self:
        ticket, plan, cache = leaves
        return cls(None, cache, ticket, plan)


@jax.tree_util.register_pytree_node_class
class StoreHandle(_PageCopyHandle):
    """An asynchronous store in flight, returned by `start_store`.

    A pytree. To wait in another program, pass it as a donated argument (JAX warns that the int32
    arrays of the handle were not usable, which is harmless):

        start = jax.jit(jaxkv.start_store, donate_argnames=("pool", "cache"))
        finish = jax.jit(lambda storing: (storing.pool, storing.cache), donate_argnums=0)
        storing = start(pool, cache, host_pages, device_pages)
        pool, cache = finish(storing)
    """

    _pool: HostPool

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
        reading = [layer for layer in self._segments if layer not in self._waited]
        rows = [0] if reading and is_stacked(self._cache) else reading
        last = len(self._segments) - 1
        (data,) = self._wait_call(
            [self._pool.data],
            [self._cache.layers[row][array] for row in rows for array in self._arrays],
            [],
            like=None,
            segment=last,
            places=() if boundary else (0,),
            boundary=(last,) if boundary else (),
        )
        return dataclasses.replace(self._pool, data=data)

    def _written_positions(self, layers: Sequence[int]) -> tuple[int, ...]:
        return ()

    def _leaves(self) -> Leaves:
        return self._ticket, self._plan, self._cache, self._pool

    def _leaves_past_boundary(self) -> Leaves:
        return self._ticket, self._plan, self._cache, self._waited_pool(boundary=True)

    @classmethod
    def _of_leaves(cls, *leaves: Any) -> Self:
        ticket, plan, cache, pool = leaves
        return cls(pool, cache, ticket, plan)


def _layer_numbers(layer: Any) -> tuple[list[int], bool]:
    """The layers of a wait, and whether `layer` is a sequence; raises a TypeError for others."""
    values = layer.tolist() if isinstance(layer, np.ndarray) else layer
    several = isinstance(values, Sequence)
    numbers = values if several else (values,)
    try:
        if any(isinstance(number, bool) for number in numbers):
            raise TypeError("a bool is not a layer")
        return [operator.index(number) for number in numbers], several
    except TypeError as error:
        raise TypeError(
            "wait: layer must be an integer, or a sequence or one-dimensional NumPy array of "
            f"integers, got {layer!r}"
        ) from error


def _check_traced_layer(layer: jax.Array) -> None:
    if layer.ndim or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise TypeError(
            f"wait: a traced layer must be an integer scalar, got {layer.dtype}{list(layer.shape)}"
        )


# No donation: outside jit arrays are immutable, at the cost of a copy.
@functools.partial(jax.jit, static_argnums=(0, 1, 5, 6, 7, 8))
def _begin_outside_jit(
    cls: type[_PageCopyHandle],
    operation: str,
    pool: HostPool,
    cache: DeviceCache | ArrayCache,
    ids: tuple[Ids, Ids],
    layers: tuple[int, ...] | None,
    tokens: range | None,
    implementation: Implementation | None,
    timeout_s: float,
) -> _PageCopyHandle:
    return cls._begin(operation, pool, cache, ids, layers, tokens, implementation, timeout_s)
