"""`bounds.check_bounds`: returns its array, and reports the value that exceeded its bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime.bounds import check_bounds


@jax.jit
def checked(carry, rows, pages):
    return check_bounds("test.step", carry, rows=(rows, 5), pages=(pages, 7))


@pytest.mark.parametrize("dtype", ["int8", "float16", "int32"])
@pytest.mark.parametrize("values", [(0, 0), (5, 7), (-1, 2)])
def test_values_within_bounds_pass(values, dtype):
    carry = jnp.arange(9).astype(dtype)
    np.testing.assert_array_equal(checked(carry, *map(jnp.int32, values)), carry)
    jaxkv.check_errors()


@pytest.mark.parametrize(
    "values, words",
    [
        ((6, 7), "test.step: the batch needs 6, more than the bound rows = 5: raise the bound"),
        ((5, 8), "test.step: the batch needs 8, more than the bound pages = 7: raise the bound"),
    ],
)
def test_exceeded_bound_is_reported(values, words):
    with pytest.raises(Exception, match=words) as raised:  # on CPU the step fails, with JAX's error
        jaxkv.check_errors(checked(jnp.arange(3), *map(jnp.int32, values)))
    if isinstance(raised.value, jaxkv.BoundError):
        assert raised.value.operation == "test.step"
    else:
        assert "BoundError" in str(raised.value)
    jaxkv.check_errors()


def test_too_many_bounds_are_rejected():
    bounds = {f"bound {i}": (jnp.int32(0), 1) for i in range(17)}
    with pytest.raises(Exception, match=r"17 values, 17 codes, 17 limits: .* from 1 to 16"):
        jax.block_until_ready(
            jax.jit(lambda carry: check_bounds("test.step", carry, **bounds))(jnp.arange(3))
        )
