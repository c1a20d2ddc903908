"""Every function of a batch checks its fields, which a step may replace."""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxkv import metadata, recurrent
from tests.util.batches import FEW, Case

BATCH = Case([1, 1], [4, 20], [[4], [5, 6, 7, 8, 9]], FEW).batch()
SHAPES = {"seq_lens": (5,), "query_start_loc": (6,), "block_table": (5, 6)}
SHAPES |= {"num_reqs": (), "num_tokens": ()}


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions of a batch, by their names in errors."""
    modules: dict[str, Any] = {"": metadata, "recurrent.": recurrent}
    modules |= {f"{m}.": has for m, has in vars(metadata).items() if hasattr(has, "build")}
    return {
        prefix + name: function
        for prefix, module in modules.items()
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if (function.__module__ == module.__name__ or prefix == "") and not name.startswith("_")
        if "batch" in inspect.signature(function).parameters
    }


FUNCTIONS = functions()
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def call(name: str, batch: Any) -> Any:
    """With None for all other arguments: the batch is checked first."""
    required = {
        key: None
        for key, parameter in inspect.signature(FUNCTIONS[name]).parameters.items()
        if parameter.default is parameter.empty
    }
    return FUNCTIONS[name](**required | {"batch": batch})


def replaced(**fields: Any) -> metadata.BatchMetadata:
    return dataclasses.replace(BATCH, **fields)


def test_functions_are_found():
    assert len(FUNCTIONS) >= 30
    assert {"slot_mapping", "flex.update", "recurrent.advance"} <= {*FUNCTIONS}


@every_function
@given(
    st.sampled_from([*SHAPES]),
    st.sampled_from(["int32", "int64", "uint32", "float32", "bool"]),
    st.lists(st.integers(0, 7), max_size=3).map(tuple),
)
def test_fields_of_other_dtypes_and_shapes_are_rejected(name, field, dtype, shape):
    wanted, named = SHAPES[field], field
    assume(shape or wanted or not np.issubdtype(dtype, np.integer))  # integers: any dtype
    if dtype == "int32" and len(shape) == len(wanted):
        assume(shape[:1] != wanted[:1])  # any number of columns
        named = "query_start_loc" if field == "seq_lens" else field  # must follow the rows
    with pytest.raises(ValueError, match=f"^{name}: batch.{named} must be int32") as error:
        call(name, replaced(**{field: np.zeros(shape, dtype)}))
    if named == field:
        assert re.search(re.escape(f"got {dtype}{[*shape]}: "), str(error.value))
    assert ("cast it to int32" in str(error.value)) == (dtype != "int32")


@every_function
@pytest.mark.parametrize("value", [0, np.int64(-1), 4.0, np.float32(4), True, None])
@pytest.mark.parametrize("size", ["block_size", "max_num_tokens"])
def test_sizes_that_are_not_integers_are_rejected(name, size, value):
    message = f"{name}: batch.{size} must be an integer >= 1, got "
    with pytest.raises(ValueError, match=re.escape(message)):
        call(name, replaced(**{size: value}))


@every_function
@pytest.mark.parametrize("batch", [(BATCH.seq_lens, BATCH.block_table), None, [BATCH]])
def test_other_types_are_rejected(name, batch):
    message = f"^{name}: batch must be a BatchMetadata, got {type(batch).__name__}: create it with"
    with pytest.raises(TypeError, match=message):
        call(name, batch)


def built(batch: metadata.BatchMetadata) -> Any:
    functions = metadata.flashinfer.build, metadata.ragged_paged.build, metadata.token_positions
    return batch, [function(batch) for function in functions]


def run(batch: metadata.BatchMetadata, jitted: bool, x64: bool) -> Any:
    with jax.enable_x64(x64):
        return jax.device_get((jax.jit(built) if jitted else built)(batch))


each_mode = pytest.mark.parametrize(
    "jitted, x64", [*itertools.product([False, True], repeat=2)], ids=["-", "x64", "jit", "jit-x64"]
)


@each_mode
@pytest.mark.parametrize(
    "kind", [int, np.int64, np.uint8, np.array], ids=lambda kind: kind.__name__
)
def test_integers_of_the_host(kind, jitted, x64):
    """With x64, sizes of NumPy would promote int32 to int64, as integers that are arguments."""
    fields = "num_reqs", "num_tokens", "max_num_tokens", "block_size"
    batch = replaced(**{field: kind(getattr(BATCH, field)) for field in fields})
    out, wanted = run(batch, jitted, x64), run(BATCH, jitted, False)
    assert str(jax.tree.structure(out)) == str(jax.tree.structure(wanted))
    for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@each_mode
@pytest.mark.parametrize("value", [2.0, True, np.float32(2), np.bool_(True), np.ones(1, np.int32)])
def test_other_numbers_of_the_host_are_rejected(value, jitted, x64):
    with pytest.raises(ValueError, match=r"batch.num_reqs must be int32\[\], got "):
        run(replaced(num_reqs=value), jitted, x64)


@pytest.mark.parametrize("value", [2**31, np.int64(-(2**31) - 1), np.uint64(2**63)])
def test_integers_outside_int32_are_rejected(value):
    with pytest.raises(ValueError, match=f"BatchMetadata: num_tokens must fit int32, got {value}"):
        replaced(num_tokens=value)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_reqs", 2.0, "got float[]: pass an integer, or int32[] on the device"),
        ("seq_lens", [4, 20, 0, 0], "got list[4]: pass an int32 array"),
        ("seq_lens", np.zeros(4), "got float64[4]: cast it to int32"),
        ("seq_lens", np.zeros((4, 1), np.int32), "got int32[4, 1]: see BatchMetadata"),
    ],
)
def test_the_error_names_a_remedy(field, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        metadata.token_positions(replaced(**{field: value}))


def test_a_size_that_is_traced_is_rejected():
    @jax.jit
    def positions(size):
        return metadata.token_positions(replaced(block_size=size))

    with pytest.raises(ValueError, match=r"batch.block_size must be an integer >= 1, got "):
        positions(4)


def test_other_leaves_are_unchanged():
    """A batch of axes for jax.vmap, which accepts no NumPy integers."""
    axes = jax.tree.map(lambda _: 0, BATCH)
    assert [type(axis) for axis in jax.tree.leaves(axes)] == [int] * 5
    batches = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), BATCH)
    out = jax.vmap(metadata.token_positions, in_axes=(axes,))(batches)
    np.testing.assert_array_equal(out, [metadata.token_positions(BATCH)] * 2)


@pytest.mark.parametrize("dtype", [None, np.int32])
def test_a_step_that_replaces_fields_with_x64(dtype):
    """A sum without dtype is int64: results would be, too, and the step compiled again."""
    traced = []

    @jax.jit
    def step(batch):
        traced.append(batch)
        batch = dataclasses.replace(
            batch, seq_lens=batch.seq_lens + 1, num_tokens=batch.query_lens.sum(dtype=dtype)
        )
        return batch, metadata.flashinfer.build(batch), metadata.ragged_paged.build(batch)

    with jax.enable_x64(True):
        if dtype is None:
            message = r"flashinfer.build: batch.num_tokens must be int32\[\], got int64\[\]: cast"
            with pytest.raises(ValueError, match=message):
                step(BATCH)
            return
        following, *_ = built = step(BATCH)
        step(following)
    assert {leaf.dtype for leaf in jax.tree.leaves(built)} == {np.dtype(np.int32)}
    assert len(traced) == 1
