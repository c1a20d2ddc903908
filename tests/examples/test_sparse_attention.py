"""Attention of the sparse example to rows that it reads by their indices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.sparse import attention

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def reference(query, rows, places, *, latent, scale):
    """One request, head and token after the other, in float64."""
    query, rows = (np.asarray(array).astype(np.float64) for array in (query, rows))
    out = np.zeros((*query.shape[:2], latent))
    for request, chosen in enumerate(places):
        keys = rows[chosen[chosen >= 0]]
        for head, vector in enumerate(query[request]):
            if len(keys):
                scores = keys @ vector * scale
                weights = np.exp(scores - scores.max())
                out[request, head] = weights @ keys[:, :latent] / weights.sum()
    return out


def case(dtype, batch, heads, latent, width, k, rows):
    """Random arrays; one request has no places, others a few without a row, and equal ones."""
    rng = np.random.default_rng(k)
    query = jnp.asarray(rng.normal(size=(batch, heads, width)), dtype)
    values = jnp.asarray(rng.normal(size=(rows, width)), dtype)
    places = rng.integers(0, rows, (batch, k)).astype(np.int32)
    places[rng.random(places.shape) < 0.2] = -1
    places[0] = -1
    return query, values, places


def check(run, arguments, dtype, latent):
    out = jax.jit(functools.partial(run, latent=latent, scale=0.3))(*arguments)
    assert out.dtype == dtype
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-5
    want = reference(*arguments, latent=latent, scale=0.3)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=tolerance, rtol=tolerance)


SHAPES = [(jnp.bfloat16, 3, 5, 64, 80, 150, 90), (jnp.float32, 2, 17, 32, 32, 16, 40)]


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=["bfloat16", "float32"])
def test_small_shapes(shape, interpreted):
    """Several programs of several chunks for a request, the last not full; heads are padded."""
    kernel = functools.partial(attention.attend_kernel, interpret=True)
    run = kernel if interpreted else attention.attend_gathered
    check(run, case(*shape), shape[0], latent=shape[3])


@pytest.mark.gpu
@pytest.mark.parametrize("batch, k", [(64, 2048), (6, 2048), (1, 100), (300, 33)])
def test_sizes_of_a_real_model(batch, k):
    arguments = case(jnp.bfloat16, batch, 16, 512, 576, k, 20000)
    check(attention.attend_rows, arguments, jnp.bfloat16, latent=512)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=["bfloat16", "float32"])
def test_small_shapes_on_a_gpu(shape):
    check(attention.attend_rows, case(*shape), shape[0], latent=shape[3])
