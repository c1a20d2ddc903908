"""Random weights in the shapes of Qwen3 models, for demonstrations, tests and benchmarks."""

import zlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .model import Config, Params

TINY = Config(256, 256, 768, 4, 4, 2, 64)
PRESETS = {
    "tiny": TINY,
    "qwen3-0.6b": Config(151_936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-8b": Config(151_936, 4096, 12_288, 36, 32, 8, 128, tie_word_embeddings=False),
}


def init_params(config: Config, seed: int, dtype: DTypeLike) -> Params:
    """Random weights for which each token depends on its entire context.

    Matrices preserve variance. The embedding is small, so that layer outputs dominate the input
    token in the residual stream, and attention is sharper than with unit norms, so that it does not
    degenerate to an average.
    """

    def make(name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.full(shape, 2 if "q_norm" in name else 1, dtype)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        scale = 0.02 if name.startswith(("model.embed", "lm_head")) else shape[1] ** -0.5
        return scale * jax.random.normal(key, shape, dtype)

    return config.build(make)
