"""Shapes and dtype of a KV cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
import numpy.typing as npt

from jaxkv._src.runtime.dtypes import _element_bits, check_byte_dtype


@dataclasses.dataclass(frozen=True)
class KVCacheSpec:
    """Shapes and dtype of a KV cache.

        spec = jaxkv.KVCacheSpec(
            num_layers=32, page_size=16, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16)
        spec.page_bytes                                       # 2 MiB: K and V of all layers

    The fields are those of vLLM's `FullAttentionSpec` and `MLAAttentionSpec`, for all layers
    together.

    Attributes:
      num_layers: number of attention layers L.
      page_size: tokens per page (vLLM: block size).
      num_kv_heads: KV heads H, of all shards together; 1 for MLA.
      head_dim: elements per head D; for MLA the latent and RoPE elements together.
      dtype: any byte-aligned dtype, including fp8 and int8; 64-bit only with jax_enable_x64.
      kind: "mha" (K and V halves; also GQA and MQA) or "mla" (one latent buffer).

    Raises:
      ValueError: a size that is not an integer in [1, 2^31), an unknown kind, MLA with several
        heads, or a dtype that JAX does not support, that is not byte-aligned or not in native byte
        order.
      TypeError: NumPy cannot interpret `dtype`.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: npt.DTypeLike
    kind: Literal["mha", "mla"] = "mha"

    def __post_init__(self) -> None:
        for name in ("num_layers", "page_size", "num_kv_heads", "head_dim"):
            object.__setattr__(self, name, check_size(getattr(self, name), name))
        if self.kind not in ("mha", "mla"):
            raise ValueError(f'kind must be "mha" or "mla", got {self.kind!r}')
        if self.kind == "mla" and self.num_kv_heads != 1:
            raise ValueError(f"num_kv_heads must be 1 for kind='mla', got {self.num_kv_heads}")
        object.__setattr__(self, "dtype", checked_dtype(self.dtype, "dtype"))

    @property
    def num_kv(self) -> int:
        """Buffers per layer: 2 (K and V) for MHA, 1 for MLA."""
        return 2 if self.kind == "mha" else 1

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of a block, one page of a K or V array: (page_size, num_kv_heads, head_dim)."""
        return (self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, one page of one layer's K or V array."""
        return math.prod(self.block_shape) * np.dtype(self.dtype).itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, K and V."""
        return self.num_layers * self.num_kv * self.block_bytes

    def select_layers(self, layers: int | Sequence[int] | None) -> tuple[int, ...]:
        """Selected layer numbers.

        Args:
          layers: a layer number, a sequence or one-dimensional NumPy array of them in any order, or
            None for all layers.

        Returns:
          The numbers in the given order, for None in ascending order.

        Raises:
          TypeError: a layer is traced.
          ValueError: a layer is not an integer, is not in `[0, num_layers)`, or occurs twice.
        """
        return select_layers(self.num_layers, layers)

    def select_tokens(self, tokens: range | None) -> range | None:
        """Selected token positions of each page.

        Args:
          tokens: a range of positions in `[0, page_size)` with step 1, or None for all.

        Returns:
          The range; None if it has all positions.

        Raises:
          TypeError: `tokens` is not a range, or it is traced.
          ValueError: the range is empty, exceeds the page or has a step other than 1.
        """
        return select_tokens(self.page_size, tokens)


def select_layers(
    num_layers: int, layers: int | Sequence[int] | None, name: str = "layers"
) -> tuple[int, ...]:
    """Selected layer numbers of `num_layers`: all, one for an int, or those of a sequence.

    `name` begins the error messages.
    """
    if layers is None:
        return tuple(range(num_layers))
    if any(isinstance(layer, jax.core.Tracer) for layer in jax.tree.leaves(layers)):
        raise TypeError(
            f"{name} must be static integers, got a traced array: pass a Python int or range, or "
            "mark the argument with static_argnames; for a traced layer use start_load on stacked "
            "arrays and wait(layer)"
        )
    chosen = layers if isinstance(layers, Sequence) else np.asarray(layers, object).reshape(-1)
    for layer in chosen:
        if isinstance(layer, bool) or not hasattr(layer, "__index__"):
            raise ValueError(f"{name} must be integers, got {layer!r}")
        if not 0 <= layer < num_layers:
            raise ValueError(f"{name} must be in [0, num_layers={num_layers}), got {layer}")
    numbers = tuple(int(layer) for layer in chosen)
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"{name} must not have duplicates, got {numbers}")
    return numbers


def select_tokens(page_size: int, tokens: range | None, name: str = "tokens") -> range | None:
    """Selected token positions of pages of `page_size` tokens; None for all.

    `name` begins the error messages.
    """
    if tokens is None:
        return None
    if any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(tokens)):
        raise TypeError(
            f"{name} must be a static range, got a traced value: pass a Python range, or mark the "
            "argument with static_argnames"
        )
    if not isinstance(tokens, range):
        raise TypeError(
            f"{name} must be a range of token positions, such as range(0, 5), or None, got "
            f"{type(tokens).__name__}"
        )
    if tokens.step != 1:
        raise ValueError(f"{name} must have step 1, got {tokens}")
    if not tokens:
        raise ValueError(
            f"{name} must have at least one position, got {tokens}; pass empty id lists to copy "
            "nothing"
        )
    if tokens.start < 0 or tokens.stop > page_size:
        raise ValueError(f"{name} must be in [0, page_size={page_size}), got {tokens}")
    return None if len(tokens) == page_size else tokens


MOST = 2**31 - 1  # page ids are int32, and XLA aborts the process where a product overflows


def check_size(value: object, name: str) -> int:
    """`value` as Python's integer, whose products do not overflow as NumPy's do.

    Raises:
      ValueError: it is not an integer in [1, 2^31).
    """
    if isinstance(value, bool) or not (isinstance(value, int | np.integer) and 1 <= value <= MOST):
        raise ValueError(f"{name} must be an integer in [1, {MOST}], got {value!r}")
    return int(value)


def check_num_elements(shape: Sequence[int], name: str) -> None:
    """Raises a ValueError for an array of 2^60 elements or more: XLA's numbers would overflow.

    XLA multiplies the sizes of an array without elements, too.
    """
    sizes = [int(size) for size in shape]
    if math.prod(max(size, 1) for size in sizes) >= 2**60:
        raise ValueError(
            f"{name} has shape {sizes}, the limit is 2^60 - 1 elements, where empty dimensions "
            "count as 1: reduce the shape or the number of pages"
        )


def checked_dtype(given: npt.DTypeLike, name: str) -> np.dtype:
    """`given` as a dtype that JAX arrays keep; otherwise raises a ValueError."""
    dtype = np.dtype(given)
    check_byte_dtype(dtype, name)
    bits = _element_bits(dtype)
    if given is None or not 8 <= bits <= 64 or not dtype.isnative:
        raise ValueError(
            f"{name} must be a numeric dtype of JAX or bool in native byte order, got {given!r}"
        )
    if bits > 32 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} is {dtype} of {bits} bits, the limit is 32 bits unless jax_enable_x64 is set"
        )
    return dtype
