"""The KV cache in HBM: layer first, one K and one V array per layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv._src.cache.spec import KVCacheSpec, check_num_elements, check_size
from jaxkv._src.runtime.devices import check_outside_jit, context_mesh, default_device
from jaxkv._src.runtime.sharding import check_head_axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DeviceCache:
    """KV pages in device memory, a pytree of `num_layers * (2 | 1)` arrays.

    K and V are separate arrays of each layer, as in SGLang's `MHATokenToKVPool`, with the pages of
    vLLM's NHD layout.

    Attributes:
      layers: for each layer (k, v), for MLA (latent,); each array is
        `dtype[num_pages, page_size, num_kv_heads, head_dim]`, inside `shard_map` with the heads of
        the shard.
      spec: the `KVCacheSpec`, of all shards together.
    """

    layers: tuple[tuple[jax.Array, ...], ...]
    spec: KVCacheSpec = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        spec: KVCacheSpec,
        *,
        num_pages: int,
        mesh: jax.sharding.Mesh | None = None,
        head_axis: str | None = None,
    ) -> DeviceCache:
        """Allocates zeroed pages in device memory.

            cache = jaxkv.DeviceCache.create(spec, num_pages=512)
            cache = load(pool, cache, host_pages, device_pages)

        Args:
          spec: the `KVCacheSpec`.
          num_pages: number of pages of the cache.
          mesh: devices of the cache; None for the mesh of `jax.set_mesh`, or else the default
            device.
          head_axis: mesh axis over which the KV heads are sharded; None to replicate the cache.

        Returns:
          The `DeviceCache`.

        Raises:
          TypeError: `spec` or `mesh` has another type.
          ValueError: `num_pages` is not an integer in [1, 2^31), an array would have 2^60 elements
            or more, the number of heads is not a multiple of the size of the mesh axis, or
            `head_axis` is given without a mesh or is not one of its axes.
          RuntimeError: called inside jit.
        """
        if not isinstance(spec, KVCacheSpec):
            raise TypeError(
                f"DeviceCache.create: spec must be a KVCacheSpec, got {type(spec).__name__}; "
                "create one cache for each group; the cache of an ArrayCacheSpec is the engine's "
                "arrays"
            )
        num_pages = check_size(num_pages, "num_pages")
        # Committed to its device like the pool. Otherwise a program would be compiled again for a
        # cache returned by a program that also takes the pool.
        sharding: jax.sharding.Sharding = SingleDeviceSharding(default_device())
        mesh = context_mesh() if mesh is None else mesh
        check_head_axis(spec.num_kv_heads, "num_kv_heads", mesh, head_axis)
        if mesh is not None:
            sharding = NamedSharding(mesh, PartitionSpec(None, None, head_axis))
        dtype = np.dtype(spec.dtype)
        shape = (num_pages, *spec.block_shape)
        check_num_elements(shape, "an array of the cache")
        layers = tuple(
            tuple(jnp.zeros(shape, dtype, device=sharding) for _ in range(spec.num_kv))
            for _ in range(spec.num_layers)
        )
        check_outside_jit(layers[0][0])
        return cls(layers=layers, spec=spec)

    @property
    def num_pages(self) -> int:
        """Number of pages of the cache."""
        return self.layers[0][0].shape[0]

    @property
    def partition_spec(self) -> PartitionSpec:
        """Sharding of each array over the mesh, for `in_specs` and `out_specs` of `shard_map`."""
        return getattr(self.layers[0][0].sharding, "spec", PartitionSpec())


def check_num_arrays(operation: str, cache: DeviceCache) -> None:
    """Raises a ValueError unless the cache has the layers of its spec, and the arrays of each."""
    num_layers, num_kv = cache.spec.num_layers, cache.spec.num_kv
    if len(cache.layers) != num_layers:
        raise ValueError(
            f"{operation}: cache.layers must have the num_layers={num_layers} layers of its spec, "
            f"got {len(cache.layers)}"
        )
    for layer, arrays in enumerate(cache.layers):
        if len(arrays) != num_kv:
            raise ValueError(
                f"{operation}: cache.layers[{layer}] must have {num_kv} arrays for kind "
                f"{cache.spec.kind!r}, got {len(arrays)}"
            )
