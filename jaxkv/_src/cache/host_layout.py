"""Host layouts: the position of (kv, layer, page, token, head, dim) in a host pool.

Python and NumPy only: no CUDA, and of JAX only its dtypes. The layouts are those of SGLang's
HiCache host pools; the device cache is always layer first, one array per layer and half.

Symbols: L layers, P pages, s tokens per page, T = P*s tokens, H KV heads, D head dim, G head
groups. The leading 2 is the K half, then the V half; MLA has one buffer, H = 1, and no such axis.

| layout            | shape                                            |
|-------------------|--------------------------------------------------|
| layer_first       | (2, L, T, H, D)                                  |
| page_first        | (2, T, L, H, D)                                  |
| page_first_direct | (2, P, L, s, H, D)                               |
| page_head         | (2, P, H, s, L, D), MHA only                     |
| page_unified      | (P, G, L, 2, s, H/G, D), MLA: (P, L, s, D)       |
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, TypeAlias, get_args

import numpy as np

from jaxkv._src.cache.spec import KVCacheSpec, check_size

Layout: TypeAlias = Literal[
    "layer_first", "page_first", "page_first_direct", "page_head", "page_unified"
]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_AXES: dict[Layout, tuple[str, ...]] = {
    "layer_first": ("kv", "layer", "page", "token", "head", "dim"),
    "page_first": ("kv", "page", "token", "layer", "head", "dim"),
    "page_first_direct": ("kv", "page", "layer", "token", "head", "dim"),
    "page_head": ("kv", "page", "head", "token", "layer", "dim"),
    "page_unified": ("page", "group", "layer", "kv", "token", "head", "dim"),
}


@dataclasses.dataclass(frozen=True)
class PageGeometry:
    """Mapping of a contiguous block of a dense array to its runs on the strided side.

    Block i of the dense array starts at `i * dense_stride_bytes`, which is `block_bytes` unless
    only a part of each block is copied.

    Byte b of the block is byte `b % run_bytes` of run (i0, i1), with runs in row-major order over
    `counts`. Its offset is `i0 * strides_bytes[0] + i1 * strides_bytes[1] + b % run_bytes` from the
    start of the block, which is `page * page_stride_bytes` past the buffer's offset.
    """

    block_bytes: int
    dense_stride_bytes: int
    run_bytes: int
    counts: tuple[int, int]
    strides_bytes: tuple[int, int]
    page_stride_bytes: int

    @classmethod
    def contiguous(cls, block_bytes: int, page_stride_bytes: int) -> PageGeometry:
        """Blocks that are one run on both sides."""
        return cls(block_bytes, block_bytes, block_bytes, (1, 1), (0, 0), page_stride_bytes)


@dataclasses.dataclass(frozen=True)
class HostLayout:
    """A host layout of `num_pages` pages of `spec`.

        layout = jaxkv.HostLayout(spec, "page_first_direct", num_pages=4096)
        layout.shape                                          # (2, P, L, page_size, H, D)
        layout.buffer_offset_bytes(kv=1, layer=3)             # V of layer 3 in page 0

    These are the layouts of SGLang's HiCache host pools.

    Attributes:
      spec: the `KVCacheSpec`.
      name: "layer_first", "page_first", "page_first_direct", "page_head" or "page_unified";
        docs/usage.md has their shapes.
      num_pages: number of pages P.
      head_groups: G of page_unified, the number of head groups, a multiple of the number of shards;
        otherwise 1.

    Raises:
      TypeError: `spec` is not a `KVCacheSpec`.
      ValueError: unknown layout, page_head with MLA, a size that is not an integer in [1, 2^31),
        several `head_groups` in another layout than page_unified, or `num_kv_heads` not a multiple
        of `head_groups`.
    """

    spec: KVCacheSpec
    name: Layout
    num_pages: int
    head_groups: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.spec, KVCacheSpec):
            raise TypeError(f"HostLayout: spec must be a KVCacheSpec, got {self.spec!r}")
        if not isinstance(self.name, str) or self.name not in _AXES:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.name!r}")
        for name in ("num_pages", "head_groups"):
            object.__setattr__(self, name, check_size(getattr(self, name), name))
        if self.name == "page_head" and self.spec.kind == "mla":
            raise ValueError("layout page_head requires kind='mha': MLA has no head axis")
        if self.head_groups != 1 and self.name != "page_unified":
            raise ValueError(
                f"head_groups={self.head_groups} requires layout page_unified, got {self.name}"
            )
        if self.spec.num_kv_heads % self.head_groups:
            raise ValueError(
                f"head_groups must divide num_kv_heads={self.spec.num_kv_heads}, "
                f"got {self.head_groups}"
            )

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        spec = self.spec
        return {
            "kv": spec.num_kv,
            "layer": spec.num_layers,
            "page": self.num_pages,
            "token": spec.page_size,
            "group": self.head_groups,
            "head": spec.num_kv_heads // self.head_groups,
            "dim": spec.head_dim,
        }

    @functools.cached_property
    def _strides(self) -> dict[str, int]:
        strides = {"group": 0}
        stride = np.dtype(self.spec.dtype).itemsize
        for axis in reversed(_AXES[self.name]):
            strides[axis] = stride
            stride *= self._sizes[axis]
        return strides

    @functools.cached_property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The logical axes of each axis of `shape`; (page, token) is the merged token axis T."""
        axes: list[tuple[str, ...]] = []
        for axis in _AXES[self.name]:
            if self.spec.kind == "mla" and (
                axis in ("kv", "group") or (axis == "head" and self.name == "page_unified")
            ):
                continue
            if axis == "token" and axes[-1] == ("page",):
                axes[-1] = ("page", "token")
            else:
                axes.append((axis,))
        return tuple(axes)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the host array, as in the table of docs/usage.md."""
        return tuple(math.prod(self._sizes[axis] for axis in merged) for merged in self.axes)

    @functools.cached_property
    def strides_bytes(self) -> tuple[int, ...]:
        """Stride in bytes along each axis of `shape`."""
        return tuple(self._strides[merged[-1]] for merged in self.axes)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the entire host array."""
        return self.num_pages * self.spec.page_bytes

    def buffer_offset_bytes(self, kv: int, layer: int, token: int = 0) -> int:
        """Byte offset of a token of page 0 in the K (kv=0) or V (kv=1) half of a layer.

        The arguments are not checked: the offset of a layer or token that the layout does not have
        is that of other data, or past the end.
        """
        strides = self._strides
        return kv * strides["kv"] + layer * strides["layer"] + token * strides["token"]

    @functools.cached_property
    def _geometry(self) -> PageGeometry:
        return self._geometry_of(self.spec.page_size)

    def _geometry_of(self, num_tokens: int) -> PageGeometry:
        sizes = {**self._sizes, "token": num_tokens}
        run = np.dtype(self.spec.dtype).itemsize
        levels: list[tuple[int, int]] = []  # (count, stride), innermost first
        for axis in ("dim", "head", "group", "token"):
            count, stride = sizes[axis], self._strides[axis]
            if count == 1:
                continue
            if not levels and stride == run:
                run *= count
            elif levels and stride == levels[-1][0] * levels[-1][1]:
                levels[-1] = (levels[-1][0] * count, levels[-1][1])
            else:
                levels.append((count, stride))
        inner, outer = [*levels, (1, 0), (1, 0)][:2]
        return PageGeometry(
            block_bytes=self.spec.block_bytes // self.spec.page_size * num_tokens,
            dense_stride_bytes=self.spec.block_bytes,
            run_bytes=run,
            counts=(outer[0], inner[0]),
            strides_bytes=(outer[1], inner[1]),
            page_stride_bytes=self._strides["page"],
        )

    def page_geometry(self, tokens: range | None = None) -> PageGeometry:
        """The runs in this layout of one page's block of a device array, or of some tokens of it.

        With `tokens`, offsets in the result count from the first of these tokens, in the pool and
        in the device array.
        """
        return self._geometry if tokens is None else self._geometry_of(len(tokens))
