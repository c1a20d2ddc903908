"""metadata.splits.split_decodes_and_prefills against slow Python on random batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import splits
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import Bounds, assert_same, cases, every_batch


@functools.cache
def compiled_split(threshold: int, require_uniform: bool, treat_short: bool):
    def split(batch, is_prefilling):
        return splits.split_decodes_and_prefills(
            batch,
            threshold,
            require_uniform=require_uniform,
            treat_short_extends_as_decodes=treat_short,
            is_prefilling=is_prefilling,
        )

    return jax.jit(split)


def split_by_hand(
    query: list[int],
    num_tokens: int,
    threshold: int,
    require_uniform: bool,
    treat_short: bool,
    is_prefilling: list[bool],
) -> tuple[int, int, int, int]:
    """The rules in the order of evaluation; `num_tokens` includes padding."""
    all_decodes = (len(query), 0, num_tokens, 0)
    if (
        max(query, default=0) <= threshold
        and (not require_uniform or threshold <= 1)
        and treat_short
    ):
        return all_decodes
    if query and query[0] > threshold:
        return 0, len(query), 0, num_tokens
    if require_uniform:
        prefills = [length not in (query[0], 0) for length in query]
    else:
        prefills = [length > threshold for length in query]
    if not treat_short:
        prefills = [a or b for a, b in zip(prefills, is_prefilling, strict=True)]
    if not any(prefills):
        return all_decodes
    first = prefills.index(True)
    tokens = sum(query[:first])
    return first, len(query) - first, tokens, num_tokens - tokens


@every_batch
@given(
    cases(),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["as it is", "decodes first", "uniform", "uniform, then not"]),
    st.integers(0, 2**32 - 1),
)
def test_split_decodes_and_prefills(case, threshold, require_uniform, treat_short, shape, seed):
    rng = np.random.default_rng(seed)
    if shape == "decodes first":
        case = case.decodes_first(threshold)
    elif shape != "as it is":
        length = min(threshold, min(case.seq_lens, default=0))
        query = [length * bool(rng.random() < 0.8) for _ in case.query_lens]
        if shape == "uniform, then not":
            tail = int(rng.integers(0, len(query) + 1))
            query[tail:] = case.query_lens[tail:]
        if sum(query) <= case.bounds.max_num_tokens:
            case = dataclasses.replace(case, query_lens=query)
    batch = case.batch()
    padding = int(rng.integers(0, case.bounds.max_num_tokens - case.num_tokens + 1))
    batch = dataclasses.replace(batch, num_tokens=np.int32(case.num_tokens + padding))
    is_prefilling = rng.random(case.bounds.max_num_reqs) < 0.2
    got = compiled_split(threshold, require_uniform, treat_short)(batch, is_prefilling)
    want = split_by_hand(
        case.query_lens,
        case.num_tokens + padding,
        threshold,
        require_uniform,
        treat_short,
        is_prefilling[: case.num_reqs].tolist(),
    )
    for one_got, one_want in zip(got, want, strict=True):
        assert_same(one_got, one_want)


@pytest.mark.parametrize(
    ("query", "threshold", "options", "want"),
    [
        ([1, 1, 1], 1, {}, (3, 0, 3, 0)),
        ([5, 7], 1, {}, (0, 2, 0, 12)),
        ([1, 1, 5, 7], 1, {}, (2, 2, 2, 12)),
        ([2, 1, 3, 4], 2, {}, (2, 2, 3, 7)),
        ([2, 2, 1, 1], 2, {"require_uniform": True}, (2, 2, 4, 2)),
        ([2, 2, 0, 0], 2, {"require_uniform": True}, (4, 0, 4, 0)),
        ([3, 3, 0, 5], 3, {"require_uniform": True}, (3, 1, 6, 5)),
        ([1, 0, 1], 1, {"require_uniform": True}, (3, 0, 2, 0)),
        ([0, 1, 1], 1, {"require_uniform": True}, (3, 0, 2, 0)),
        ([3, 3], 2, {"require_uniform": True}, (0, 2, 0, 6)),
        ([1, 3, 1], 1, {"require_uniform": True}, (1, 2, 1, 4)),
        (
            [1, 1, 1],
            1,
            {"treat_short_extends_as_decodes": False, "is_prefilling": [False, True, False]},
            (1, 2, 1, 2),
        ),
        ([], 1, {}, (0, 0, 0, 0)),
    ],
)
def test_split_examples(query, threshold, options, want):
    bounds = Bounds(4, 16, 2, 8)
    batch = BatchMetadata.from_host(query, query, [[1, 2]] * len(query), **bounds._asdict())
    if "is_prefilling" in options:
        options = options | {"is_prefilling": jnp.array([*options["is_prefilling"], False])}
    assert splits.split_decodes_and_prefills(batch, threshold, **options) == want


def test_split_rejects_invalid_arguments():
    batch = BatchMetadata.from_host([1], [1], [[1]], **Bounds(2, 4, 3, 4)._asdict())
    with pytest.raises(ValueError, match="decode_threshold must be >= 0 tokens, got -1"):
        splits.split_decodes_and_prefills(batch, -1)
    with pytest.raises(ValueError, match=r"is_prefilling must be \[2 rows\], got \(1,\)"):
        splits.split_decodes_and_prefills(batch, is_prefilling=np.ones(1, bool))
    for flags in (np.ones(2, np.int32), jnp.ones(2, jnp.int8)):
        with pytest.raises(ValueError, match=r"is_prefilling must be bool\[2\], got int"):
            splits.split_decodes_and_prefills(batch, is_prefilling=flags)
    with pytest.raises(ValueError, match="requires is_prefilling"):
        splits.split_decodes_and_prefills(batch, treat_short_extends_as_decodes=False)
