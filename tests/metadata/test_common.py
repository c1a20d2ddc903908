"""metadata.common against slow Python on random batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import common
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import FEW, Case, assert_same, cases, every_batch, padded

SEEDS = st.integers(0, 2**32 - 1)


# --------------------------------------------------------------------------------------------------
# BatchMetadata


@given(cases())
def test_from_host_pads(case: Case):
    batch, b = case.batch(), case.bounds
    assert_same(batch.query_start_loc, padded(case.starts, b.max_num_reqs + 1, case.num_tokens))
    assert_same(batch.seq_lens, padded(case.seq_lens, b.max_num_reqs))
    assert_same(batch.query_lens, padded(case.query_lens, b.max_num_reqs))
    table = np.full((b.max_num_reqs, b.max_blocks), common.NULL_BLOCK)
    for row, blocks in enumerate(case.tables):
        table[row, : len(blocks)] = blocks
    assert_same(batch.block_table, table)
    assert_same(batch.num_reqs, case.num_reqs)
    assert_same(batch.num_tokens, case.num_tokens)
    assert (batch.max_num_reqs, batch.max_num_tokens, batch.max_blocks, batch.block_size) == b
    np.testing.assert_array_equal(
        batch.row_mask, [row < case.num_reqs for row in range(b.max_num_reqs)]
    )


@given(cases(), st.sampled_from([np.int32, np.uint16, np.int64]))
def test_from_host_of_a_table_equals_that_of_lists(case: Case, dtype):
    lists, b = case.batch(), case.bounds
    columns = max(map(len, case.tables), default=0)
    table = np.array(lists.block_table)[: case.num_reqs, :columns].astype(dtype)
    of_table = BatchMetadata.from_host(case.query_lens, case.seq_lens, table, **b._asdict())
    for one, other in zip(jax.tree.leaves(of_table), jax.tree.leaves(lists), strict=True):
        assert_same(one, other)
    before = np.array(of_table.block_table)
    table[...] = 0
    assert_same(of_table.block_table, before)  # a copy: the scheduler may overwrite its table


def from_host(query=(1,), seq=(1,), table=((1,),), **sizes) -> BatchMetadata:
    bounds = {"max_num_reqs": 2, "max_num_tokens": 4, "max_blocks": 3, "block_size": 4}
    table = table if isinstance(table, np.ndarray) else list(table)
    return BatchMetadata.from_host(list(query), list(seq), table, **(bounds | sizes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": (1, 1)}, "got 2, 1 and 1 requests"),
        ({"table": ()}, "got 1, 1 and 0 requests"),
        ({"query": (-1,)}, "request 0 with -1 query tokens"),
        ({"query": (2,)}, "query tokens <= context"),
        ({"seq": (5,)}, "context <= blocks of 4 tokens"),
        ({"seq": (9,), "cp_world_size": 2}, "context <= blocks of 8 tokens"),
        ({"table": ((1, 2, 3, 4),)}, "blocks <= max_blocks=3"),
        ({"query": (0, 0), "seq": (0, 1), "table": ((), ())}, "request 1 with 0 query tokens"),
        ({"query": (0,) * 3, "seq": (0,) * 3, "table": ((),) * 3}, "3 requests exceed"),
        ({"query": (5,), "seq": (5,), "table": ((1, 2),)}, "5 query tokens exceed"),
        ({"table": ((-1,),)}, r"\[0, 536870911\] .* got -1 to -1; pad rows of block_table with 0"),
        ({"table": ((2**29,),)}, r"must be in \[0, 536870911\]"),
        ({"table": ((2**32,),)}, r"must be in \[0, 536870911\] .* to 4294967296$"),
        ({"seq": (2**31,), "block_size": 2**31}, "context < 2"),
        ({"max_num_reqs": 0}, "max_num_reqs must be >= 1"),
        ({"max_num_tokens": 0}, "max_num_tokens must be >= 1"),
        ({"max_blocks": 0}, "max_blocks must be >= 1"),
        ({"block_size": 0}, "block_size must be >= 1"),
        ({"cp_world_size": 0}, "cp_world_size must be >= 1"),
        ({"query": (0.9,)}, r"query_lens must be integers in one dimension, got float64\[1\]"),
        ({"seq": (1.9,)}, r"seq_lens must be integers .* got float64\[1\]"),
        ({"query": ([1],)}, r"query_lens must be integers .* got int64\[1, 1\]"),
        ({"table": ((1, 2.2),)}, r"row 0 of block_table must be integers .* got float64\[2\]"),
        ({"table": np.array([[1.5]])}, r"two dimensions, got float64\[1, 1\]"),
        ({"table": np.array([1])}, r"two dimensions, got int64\[1\]"),
        ({"table": np.array([[-1]])}, r"\[0, 536870911\] .* got -1 to -1"),
        ({"table": np.array([[2**31]])}, r"got 2147483648 to 2147483648"),
        ({"table": np.ones((1, 4), np.int32)}, "blocks <= max_blocks=3"),
        ({"table": ([[1]],)}, r"row 0 of block_table must be integers .* got int64\[1, 1\]"),
        ({"table": ([1], None)}, r"row 1 of block_table must be integers .* got object\[\]"),
        ({"table": ("abc", "d")}, r"row 0 of block_table must be integers .* got <U3\[\]"),
        ({"table": ([1], [[1, 2], [3]])}, "row 1 of .* got lists of different lengths"),
        ({"table": ([np.uint64(2**64 - 1)],)}, "block ids must be .* to 18446744073709551615"),
        ({"table": ([-1], np.array([2**64 - 1]))}, "row 1 of block_table must fit int64, got 1844"),
        ({"seq": np.array([2**64 - 1])}, "seq_lens must fit int64, got 18446744073709551615"),
        (
            {
                "query": (2**30, 2**30),
                "seq": (2**30, 2**30),
                "table": ([1], [1]),
                "block_size": 2**30,
                "max_num_tokens": 2**31,
            },
            "2147483648 query tokens exceed the .* int32",
        ),
        (
            {"query": (0, 2), "seq": (0, 9), "table": np.array([[0, 0, 0], [1, 2, 0]])},
            "request 1 with 2 query tokens .* of 9 tokens .*: column 2 of block_table is 0 .NULL_B",
        ),
        (
            {"seq": (9,), "table": np.array([[1, 0]]), "cp_world_size": 2},
            "request 0 .*: column 1 of block_table is 0",
        ),
        ({"seq": (9,), "table": ((1, 0),), "cp_world_size": 2}, "column 1 of block_table is 0"),
        ({"table": ((0,),)}, "request 0 .*: column 0 of block_table is 0"),
    ],
)
def test_from_host_rejects_invalid_arguments(arguments, message):
    from_host()
    with pytest.raises(ValueError, match=message):
        from_host(**arguments)


@pytest.mark.parametrize("name", ["block_size", "max_num_reqs", "cp_world_size"])
@pytest.mark.parametrize("value", [True, np.True_])
def test_from_host_rejects_bools_as_sizes(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got bool"):
        from_host(**{name: value})


def test_batches_compare_by_identity():
    """The arrays have no equality of one bool."""
    batch = from_host()
    assert batch == batch and batch != from_host() and len({batch, batch}) == 1


def test_from_host_accepts_generators():
    batch = from_host(table=(row for row in ((1, 2),)))
    assert batch.block_table[0].tolist() == [1, 2, 0]


def test_from_host_accepts_limits():
    batch = from_host((4, 0), (12, 0), ((2**29 - 1, 1, 2), ()))
    assert batch.block_table[0, 0] * 4 + 3 == 2**31 - 1
    assert from_host((), (), ()).num_reqs == 0
    of_both = from_host((1, 1), (1, 1), (np.array([1], np.uint64), np.array([2], np.int64)))
    assert of_both.block_table[:, 0].tolist() == [1, 2]
    # Blocks that a window has passed, states that were not saved, a request without tokens.
    assert from_host((4, 0), (12, 12), np.array([[0, 0, 2], [0, 0, 0]])).num_tokens == 4
    assert from_host(seq=(8,), cp_world_size=2).seq_lens[0] == 8


def test_numpy_sizes_do_not_promote_int32():
    sizes = {"max_num_reqs": 2, "max_num_tokens": 4, "max_blocks": 3, "block_size": 4}
    with jax.enable_x64(True):
        batch = from_host(**{name: np.int64(size) for name, size in sizes.items()})
        assert type(batch.block_size) is type(batch.max_num_tokens) is int
        assert_same(common.slot_mapping(batch, common.token_positions(batch)), [4, -1, -1, -1])
    for name in sizes:
        with pytest.raises(TypeError, match="float"):
            from_host(**{name: 4.5})


# --------------------------------------------------------------------------------------------------
# Values at their first occurrence


def unique_by_hand(x, ignored: int, pad: int) -> np.ndarray:
    out = np.full_like(x, pad)
    for row, values in enumerate(x.tolist()):
        found = [value for value in dict.fromkeys(values) if value != ignored]
        out[row, : len(found)] = found
    return out


@every_batch
@given(
    st.sampled_from([(1, 1), (3, 7), (2, 300)]),
    st.sampled_from([0, 5, 400]),
    st.sampled_from([(0, -1), (3, 5)]),
    SEEDS,
)
def test_unique_first_occurrence(shape, max_value, special, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, rng.integers(0, max_value + 1) + 1, shape, dtype=np.int32)
    ignored, pad = special
    got = compiled_unique()(x, max_value, ignored=ignored, pad=pad)
    assert_same(got, unique_by_hand(x, ignored, pad))


@functools.cache
def compiled_unique():
    return jax.jit(common.unique_first_occurrence, static_argnames=("max_value", "ignored", "pad"))


def test_unique_first_occurrence_of_long_rows():
    x = np.random.default_rng(0).integers(0, 5001, (2, 4096), dtype=np.int32)
    assert_same(compiled_unique()(x, 5000), unique_by_hand(x, 0, -1))
    assert_same(
        common.unique_first_occurrence(jnp.array([[3, 0, 2, 3, 2, 1]]), 3), [[3, 2, 1, -1, -1, -1]]
    )
    with pytest.raises(ValueError, match="max_value must be >= 0"):
        common.unique_first_occurrence(x, -1)
    for dtype in (jnp.uint8, jnp.uint32):
        unsigned = jnp.array([[3, 0, 2, 3]], dtype)
        assert_same(common.unique_first_occurrence(unsigned, 3), [[3, 2, -1, -1]])


@pytest.mark.parametrize("values", [[3, -1, 2, 3], [3, 4, 0, 3]])
def test_unique_first_occurrence_rejects_host_values_out_of_range(values):
    x = np.array([values], np.int32)
    with pytest.raises(ValueError, match=rf"max_value=3\], got values from {x.min()} to {x.max()}"):
        common.unique_first_occurrence(x, 3)
    assert common.unique_first_occurrence(x[:, :0], 3).shape == (1, 0)


# --------------------------------------------------------------------------------------------------
# Tokens


@functools.cache
def compiled_tokens(cp_world_size: int, cp_interleave: int):
    def build(batch: BatchMetadata, cp_rank):
        positions = common.token_positions(batch)
        context_parallel = {
            "cp_world_size": cp_world_size,
            "cp_rank": cp_rank,
            "cp_interleave": cp_interleave,
        }
        return {
            "num_computed_tokens": common.num_computed_tokens(batch),
            "token_to_request": common.token_to_request(
                batch.query_start_loc, batch.max_num_tokens
            ),
            "token_positions": positions,
            "slot_mapping": common.slot_mapping(batch, positions, **context_parallel),
            "logits_indices": common.logits_indices(batch),
            "local": common.dcp_local_seq_lens(
                batch.seq_lens, cp_world_size, cp_rank, cp_interleave
            ),
            "all_local": common.dcp_local_seq_lens(
                batch.seq_lens, cp_world_size, None, cp_interleave
            ),
        }  # fmt: skip

    return jax.jit(build)


@every_batch
@given(cases(), st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2)]), st.integers(0, 2))
def test_token_positions_and_slots(case: Case, parallel: tuple[int, int], rank: int):
    world_size, run = parallel
    rank %= world_size
    b = case.bounds
    got = compiled_tokens(*parallel)(case.batch(), np.int32(rank))

    rows, positions, slots = [], [], []
    for row, (query, seq) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for position in range(seq - query, seq):
            rows.append(row)
            positions.append(position)
            # Each rank fills its own blocks with the runs assigned to it.
            round_, place = divmod(position, world_size * run)
            block, offset = divmod(round_ * run + place % run, b.block_size)
            on_this_rank = place // run == rank
            slots.append(case.tables[row][block] * b.block_size + offset if on_this_rank else -1)
    assert_same(got["token_to_request"], padded(rows, b.max_num_tokens))
    assert_same(got["token_positions"], padded(positions, b.max_num_tokens))
    assert_same(got["slot_mapping"], padded(slots, b.max_num_tokens, common.PAD_SLOT))

    computed = [s - q for q, s in zip(case.query_lens, case.seq_lens, strict=True)]
    assert_same(got["num_computed_tokens"], padded(computed, b.max_num_reqs))
    last = [max(end - 1, 0) for end in case.starts[1:]]
    assert_same(got["logits_indices"], padded(last, b.max_num_reqs, max(case.num_tokens - 1, 0)))

    owner = np.arange(b.max_blocks * b.block_size) // run % world_size
    held = np.array([np.bincount(owner[:n], minlength=world_size) for n in range(len(owner) + 1)])
    local = held[padded(case.seq_lens, b.max_num_reqs)]
    assert_same(got["all_local"], local)
    assert_same(got["local"], local[:, rank])


def test_all_batches_share_one_executable():
    traced = []

    def tokens(batch: BatchMetadata):
        traced.append(batch)
        return common.slot_mapping(batch, common.token_positions(batch))

    build = jax.jit(tokens)
    for query in ([], [1], [0, 5, 0, 3], [4] * 5):
        seq = [length + 2 for length in query]
        batch = BatchMetadata.from_host(query, seq, [[1, 2]] * len(query), **FEW._asdict())
        build(batch)
    assert len(traced) == 1


def test_slot_mapping_examples():
    batch = BatchMetadata.from_host(
        [10], [10], [[7, 3]],
        max_num_reqs=1, max_num_tokens=12, max_blocks=2, block_size=4, cp_world_size=2,
    )  # fmt: skip
    positions = common.token_positions(batch)
    ranks = [common.slot_mapping(batch, positions, cp_world_size=2, cp_rank=r) for r in (0, 1)]
    assert_same(ranks[0], [28, -1, 29, -1, 30, -1, 31, -1, 12, -1, -1, -1])
    assert_same(ranks[1], [-1, 28, -1, 29, -1, 30, -1, 31, -1, 12, -1, -1])
    # Without context parallelism the table ends after 8 tokens: no other slot is overwritten.
    assert_same(common.slot_mapping(batch, positions), [28, 29, 30, 31, 12, 13, 14, 15] + [-1] * 4)
    assert_same(common.slot_mapping(batch, positions - 8)[8:], [28, 29, -1, -1])
    assert_same(common.slot_mapping(batch, positions - 8)[:8], [-1] * 8)


def test_largest_slot():
    batch = from_host((1,), (4,), ((2**29 - 1,),))
    positions = common.token_positions(batch)
    assert_same(common.slot_mapping(batch, positions), [2**31 - 1, -1, -1, -1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp_world_size": 0}, "cp_world_size must be >= 1, got 0"),
        ({"cp_interleave": 0}, "cp_interleave must be >= 1, got 0"),
        ({"cp_interleave": 3}, "cp_interleave=3 tokens must divide block_size=4 tokens"),
        ({"cp_world_size": 2, "cp_rank": 2}, r"cp_rank must be in \[0, 2\), got 2"),
        ({"cp_rank": -1}, r"cp_rank must be in \[0, 1\), got -1"),
        ({"cp_rank": np.array(2**32)}, r"cp_rank must be in \[0, 1\), got 4294967296"),
        ({"cp_rank": np.array([2**32])}, "cp_rank must fit int32, got 4294967296"),
        ({"positions": np.array([2**32 + 1, 0, 0, 0])}, "positions must fit int32, got 0 .. 4294"),
        ({"cp_rank": jnp.float32(0)}, "cp_rank must be int32, got float32"),
        ({"positions": np.zeros(1, np.int32)}, r"positions must be \[4 tokens\], got \(1,\)"),
        ({"positions": jnp.zeros(3, jnp.int32)}, r"positions must be \[4 tokens\], got \(3,\)"),
        ({"positions": np.zeros(4, np.float32)}, "positions must be int32, got float32"),
    ],
)
def test_slot_mapping_rejects_invalid_arguments(arguments, message):
    batch = from_host()
    valid = {"positions": common.token_positions(batch)}
    with pytest.raises(ValueError, match=message):
        common.slot_mapping(batch, **(valid | arguments))


def test_dcp_local_seq_lens_rejects_invalid_arguments():
    lens = jnp.array([3], jnp.int32)
    with pytest.raises(ValueError, match=r"^world_size must be >= 1"):
        common.dcp_local_seq_lens(lens, 0, None, 1)
    with pytest.raises(ValueError, match=r"^interleave must be >= 1"):
        common.dcp_local_seq_lens(lens, 2, None, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 3"):
        common.dcp_local_seq_lens(lens, 2, 3, 1)
