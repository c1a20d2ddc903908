"""The KV cache in HBM: layer first, one array per layer and half."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv._src.cache.spec import KVCacheSpec
from jaxkv._src.runtime.devices import check_outside_jit, default_device
from jaxkv._src.runtime.sharding import check_head_axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceCache:
    """KV pages in device memory, a pytree of `num_layers * (2 | 1)` arrays.

    Attributes:
      layers: for each layer (k, v), for MLA (latent,); each array is
        `dtype[num_pages, page_size, num_kv_heads, head_dim]`, inside `shard_map` with the heads of
        the shard.
      spec: what a token is made of (all shards together).
    """

    layers: tuple[tuple[Any, ...], ...]
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
        """Zeroed pages in device memory.

        Args:
          spec: what a token is made of.
          num_pages: pages of the cache.
          mesh: devices to place the cache on; None for the default device.
          head_axis: mesh axis that the KV heads are split over; None for a copy on each device.

        Raises:
          ValueError: fewer than one page, heads that the mesh axis does not divide, or a head_axis
            without a mesh.
          RuntimeError: made inside of jit.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages must be >= 1, got {num_pages}")
        # Committed to its device like the pool, so that programs do not compile a second time when
        # they get the cache back from one that also took the pool.
        sharding: jax.sharding.Sharding = SingleDeviceSharding(default_device())
        check_head_axis(spec.num_kv_heads, "num_kv_heads", mesh, head_axis)
        if mesh is not None:
            sharding = NamedSharding(mesh, PartitionSpec(None, None, head_axis))
        dtype = np.dtype(spec.dtype)
        shape = (num_pages, *spec.block_shape)
        layers = tuple(
            tuple(jnp.zeros(shape, dtype, device=sharding) for _ in range(spec.num_kv))
            for _ in range(spec.num_layers)
        )
        check_outside_jit(layers[0][0])
        return cls(layers=layers, spec=spec)

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self.layers[0][0].shape[0]

    @property
    def partition_spec(self) -> PartitionSpec:
        """How each array is split over the mesh: for `in_specs` and `out_specs` of `shard_map`."""
        return getattr(self.layers[0][0].sharding, "spec", PartitionSpec())
