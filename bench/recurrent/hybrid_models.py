"""Recurrent states of two hybrid models, and their memory."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.recurrent import StateKind

DRAFTS = 3
MAX_BYTES = {"cpu": 16 << 20, "gpu": 32 << 30}


class Model(NamedTuple):
    """Recurrent states of a model, 2 bytes an element.

    Attributes:
      name: model name.
      layers: number of layers with recurrent states.
      width, dim: tokens of a convolution's window, including drafts, and their elements.
      temporal: shape of a temporal state.
      block_size: tokens per block.
    """

    name: str
    layers: int
    width: int
    dim: int
    temporal: tuple[int, int, int]
    block_size: int

    def shapes(self, conv: StateKind) -> dict[StateKind, tuple[int, ...]]:
        """Block shapes of the layer's two arrays."""
        window = (self.width, self.dim) if conv is StateKind.CONV_SD else (self.dim, self.width)
        return {conv: window, StateKind.TEMPORAL: self.temporal}

    def moved_bytes(self, bias: int) -> int:
        """Bytes copied per layer for a row whose state is `bias` tokens past its window's start."""
        return 2 * ((self.width - bias) * self.dim + math.prod(self.temporal))


MODELS = (
    Model("120B-class hybrid", 40, 3 + DRAFTS, 10240, (128, 64, 128), 4336),
    Model("small hybrid", 36, 3 + DRAFTS, 3328, (48, 64, 128), 400),
)


@functools.partial(jax.jit, static_argnums=0)
def scrambled(shape: tuple[int, ...]) -> jax.Array:
    """Pseudorandom uint16, made without the scratch memory of random bits."""
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    return ((index * jnp.uint32(2654435761)) >> 16).astype(jnp.uint16).reshape(shape)
