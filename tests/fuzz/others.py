"""Random calls of everything but page copies: sparse rows, recurrent states, all-reduces,
metadata."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from tests.fuzz.copies import RENEWED
from tests.metadata import (
    test_common,
    test_flash_attention,
    test_flashinfer,
    test_gdn,
    test_kv_sharing,
    test_local_attention,
    test_ragged_paged,
    test_segments,
)
from tests.util import recurrent_reference as reference
from tests.util.batches import FEW, ONE, Case
from tests.util.ranks import ORDERED, TILED, memory_of, sums
from tests.util.recurrent_cases import (
    DS,
    DTYPES,
    SD,
    TEMPORAL,
    batch_of,
    post,
    pre,
    random_accepted,
    random_rows,
    random_states,
    same_bits,
)
from tests.util.sparse_cases import Pair

Cases = Iterator[None]


# ---- Sparse rows ---------------------------------------------------------------------------------


def _sparse(rng: np.random.Generator, kind: str) -> Cases:
    layouts = ("page_first_direct", "layer_first", "page_first")
    pairs: list[Pair] = []
    for call in itertools.count():
        if call % (len(layouts) * RENEWED) == 0:
            pairs = [Pair(layout=layout, seed=int(rng.integers(2**31))) for layout in layouts]
        pair = pairs[int(rng.integers(len(pairs)))]
        batch, _ = pair.shape
        most = pair.reference.max_length
        if rng.random() < 0.1:
            pair.release(rng.random(batch) < 0.5)
        # Near a position, so that half of the rows are present.
        ids = (rng.integers(0, most, (batch, 1)) + rng.integers(0, 9, (batch, 5))) % most
        ids[rng.random(ids.shape) < 0.2] = -1
        wrong = rng.random(ids.shape) < 0.02
        ids[wrong] = rng.choice([-2, most, 2**31 - 1, -(2**31)], wrong.sum())
        if kind == "fetch":
            lengths = np.where(rng.random(batch) < 0.1, rng.integers(-1, most, batch), most)
            pair.fetch(ids, lengths)
        else:
            pair.append(ids[:, :2])
        pair.check_errors()
        yield


sparse_fetch = functools.partial(_sparse, kind="fetch")
sparse_append = functools.partial(_sparse, kind="append")


# ---- Recurrent states ----------------------------------------------------------------------------

KINDS = (SD, TEMPORAL, DS)
SHAPES = [(6, 5, 2), (3, 11), (7, 6)]


def recurrent(rng: np.random.Generator) -> Cases:
    dtypes = [DTYPES[name] for name in ("float16", "float32", "int8")]
    while True:
        rows = random_rows(rng, 12)
        states = random_states(rng, KINDS, SHAPES, dtypes, rows.table.size + 1)
        want, accepted = [state.copy() for state in states], random_accepted(rng, rows)
        if rng.random() < 0.5:
            counts = reference.postprocess(want, KINDS, rows, accepted)
            drafts = rows.drafts.astype(np.int32)
            got, found = post(states, batch_of(rows), accepted, drafts, KINDS)
        else:
            columns = np.minimum(rows.computed // rows.block_size, rows.table.shape[1] - 1)
            index = np.where(rng.random(len(columns)) < 0.3, -1, columns).astype(np.int32)
            counts, new_index = reference.preprocess(want, KINDS, rows, accepted, index)
            got, found, got_index = pre(states, batch_of(rows), accepted, index, KINDS)
            np.testing.assert_array_equal(got_index, new_index)
        np.testing.assert_array_equal(found, counts)
        assert all(same_bits(*pair) for pair in zip(got, want, strict=True))
        with contextlib.suppress(jaxkv.PageIndexError):  # of null blocks, which are not moved
            jaxkv.check_errors(found)
        yield


# ---- All-reduces ---------------------------------------------------------------------------------

SIZES = (1, 7, 64, 1023, 3000)


def summed(x: np.ndarray) -> np.ndarray:
    """In rank order, in float32, rounded once."""
    total = x[0].astype(np.float32)
    for row in x[1:]:
        total = total + row.astype(np.float32)
    return total.astype(x.dtype)


def all_reduce(rng: np.random.Generator) -> Cases:
    methods = (*ORDERED, TILED)
    kinds = []
    for world_size in (n for n in (2, 4) if n <= jax.device_count()):
        plain = memory_of(world_size)
        tiled = memory_of(world_size, method=TILED)
        for number in range(3 * len(methods)):
            method = methods[number % len(methods)]
            step = sums(tiled if method == TILED else plain, method)
            dtype = ("float32", "bfloat16", "float16")[number % 3]
            kinds.append((world_size, step, dtype, SIZES[number % len(SIZES)]))
    while kinds:
        world_size, step, dtype, size = kinds[int(rng.integers(len(kinds)))]
        x = rng.standard_normal((world_size, size)).astype(jnp.dtype(dtype))
        got = np.asarray(step(x))
        want = np.broadcast_to(summed(x), x.shape)
        np.testing.assert_array_equal(got.view(np.uint8), want.copy().view(np.uint8))
        yield


# ---- Metadata ------------------------------------------------------------------------------------


def random_batch(rng: np.random.Generator) -> Case:
    """A batch of any number of requests, each with any number of tokens that fits."""
    bounds = (ONE, FEW)[int(rng.random() < 0.9)]
    num_reqs = int(rng.integers(0, bounds.max_num_reqs + 1))
    longest = bounds.max_blocks * bounds.block_size
    query, tokens = [], bounds.max_num_tokens
    for _ in range(num_reqs):
        most = 1 if rng.random() < 0.5 else longest
        query.append(int(rng.integers(0, min(most, tokens) + 1)))
        tokens -= query[-1]
    seq = [q + int(rng.integers(0, longest - q + 1)) * int(rng.random() < 0.8) for q in query]
    free = rng.permutation(np.arange(1, 1 + bounds.max_num_reqs * bounds.max_blocks)).tolist()
    tables = [[free.pop() for _ in range(-(-n // bounds.block_size))] for n in seq]
    return Case(query, seq, tables, bounds)


def _check(test: Any, case: Case, *arguments: Any) -> None:
    """The comparison of a test with its reference, for this batch."""
    test.hypothesis.inner_test(case, *arguments)


BUILDERS: tuple[Callable[[np.random.Generator, Case], None], ...] = (
    lambda rng, case: _check(test_flashinfer.test_pages, case, rng.random() < 0.5, 3),
    lambda rng, case: _check(test_flashinfer.test_dense, case, rng.random() < 0.5, 1),
    lambda rng, case: _check(test_ragged_paged.test_build, case, rng.random() < 0.5, "packed"),
    lambda rng, case: _check(test_local_attention.test_local_attention, case, 2),
    lambda rng, case: _check(
        test_common.test_token_positions_and_slots, case, (3, 2), int(rng.integers(3))
    ),
    lambda rng, case: _check(test_gdn.test_build_linear, case, rng.random() < 0.5),
    lambda rng, case: _check(
        test_flash_attention.test_build, case, test_flash_attention.OPTIONS[0]
    ),
    lambda rng, case: _check(test_segments.test_row_of, case),
    lambda rng, case: _check(
        test_kv_sharing.test_fast_prefill, case, int(rng.integers(2**32)), "any"
    ),
)


def metadata(rng: np.random.Generator) -> Cases:
    while True:
        BUILDERS[int(rng.integers(len(BUILDERS)))](rng, random_batch(rng))
        yield
