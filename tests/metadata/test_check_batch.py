"""Every function of a batch checks its fields, which a step may replace."""

import dataclasses
import inspect
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
    if dtype == "int32" and len(shape) == len(wanted):
        assume(shape[:1] != wanted[:1])  # any number of columns
        named = "query_start_loc" if field == "seq_lens" else field  # must follow the rows
    with pytest.raises(ValueError, match=f"^{name}: batch.{named} must be int32") as error:
        call(name, replaced(**{field: np.zeros(shape, dtype)}))
    if named == field:
        assert re.search(re.escape(f"got {dtype}{[*shape]}: "), str(error.value))
    assert ("cast it to int32" in str(error.value)) == (dtype != "int32")


@every_function
@pytest.mark.parametrize("value", [np.int64(4), 0, 4.0, None])
@pytest.mark.parametrize("size", ["block_size", "max_num_tokens"])
def test_sizes_that_are_not_python_integers_are_rejected(name, size, value):
    """A NumPy integer would promote int32 to int64 with jax_enable_x64."""
    message = re.escape(f"{name}: batch.{size} must be a Python int >= 1, got {value!r}")
    with pytest.raises(ValueError, match=message):
        call(name, replaced(**{size: value}))


@every_function
@pytest.mark.parametrize("batch", [(BATCH.seq_lens, BATCH.block_table), None, [BATCH]])
def test_other_types_are_rejected(name, batch):
    message = f"^{name}: batch must be a BatchMetadata, got {type(batch).__name__}: create it with"
    with pytest.raises(TypeError, match=message):
        call(name, batch)


def test_a_number_of_python_is_rejected():
    with pytest.raises(ValueError, match=r"batch.num_reqs must be int32\[\], got int\[\]: cast it"):
        metadata.ragged_paged.build(replaced(num_reqs=2))


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
