"""Packed arrays of the serving example: one upload, and the same pytree on the device."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from examples.serving.packed import pack, unpack

pytestmark = pytest.mark.end_to_end

LEAVES = st.one_of(
    hnp.arrays(np.int32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=3)),
    hnp.arrays(np.uint32, hnp.array_shapes(max_dims=1, max_side=5)),
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
)


class Pair(NamedTuple):
    first: object
    second: object


@given(st.lists(LEAVES, min_size=1, max_size=4))
def test_every_bit_is_the_same(leaves):
    tree = Pair(leaves, {"last": leaves[-1]})
    packed = pack(tree)
    assert packed.words.dtype == np.int32 and packed.others == ()
    got = jax.jit(unpack)(packed)
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(tree))
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
        assert (left.shape, left.dtype) == (np.shape(right), right.dtype)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_other_arrays_are_passed_on_where_they_are():
    ids = jax.device_put(np.arange(3, dtype=np.int32))
    packed = pack({"ids": ids, "row": np.float32(2.5), "table": np.arange(6).astype(np.int32)})
    assert packed.others == (ids,) and packed.others[0] is ids
    got = jax.jit(unpack)(packed)
    assert got["row"] == np.float32(2.5)
    np.testing.assert_array_equal(got["ids"], ids)
    np.testing.assert_array_equal(got["table"], np.arange(6))


def test_a_view_with_strides_is_packed_in_order():
    table = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(jax.jit(unpack)(pack([table]))[0], table)


def test_programs_depend_on_shapes_and_not_on_values():
    traced = []
    run = jax.jit(lambda packed: traced.append(unpack(packed)))
    for value in (1, 2):
        run(pack((np.full(3, value, np.int32), np.float32(value))))
    assert len(traced) == 1


def test_elements_of_other_sizes_are_rejected():
    with pytest.raises(ValueError, match="pack: leaves of 4 bytes an element, got float64"):
        pack([np.zeros(2)])
