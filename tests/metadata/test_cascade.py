"""metadata.cascade against an explicit form of its rule and rows split one by one."""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import cascade, common
from jaxkv.metadata.cascade import common_prefix_blocks, use_cascade
from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata
from tests.util.batches import Case, assert_same, cases, every_batch


@functools.cache
def compiled():
    def build(batch: BatchMetadata, num_common_blocks):
        levels = cascade.build(batch, num_common_blocks)
        suffix = levels.suffix
        return levels, common.slot_mapping(suffix, common.token_positions(suffix))

    return jax.jit(build)


@every_batch
@given(cases(), st.integers(0, 2**32 - 1))
def test_cascade_metadata(case: Case, seed: int):
    rng = np.random.default_rng(seed)
    b, batch = case.bounds, case.batch()
    computed = [s - q for q, s in zip(case.query_lens, case.seq_lens, strict=True)]
    most = min(computed, default=0) // b.block_size
    n = most if rng.random() < 0.5 else int(rng.integers(0, most + 1))
    levels, slots = compiled()(batch, np.int32(n))
    prefix, suffix = levels.prefix, levels.suffix

    assert_same(prefix.query_start_loc, [0, case.num_tokens])
    assert_same(prefix.seq_lens, [n * b.block_size])
    row = case.tables[0][:n] if case.tables else []
    assert_same(prefix.block_table, [row + [NULL_BLOCK] * (b.max_blocks - n)])
    assert_same(prefix.num_reqs, 1)
    assert_same(prefix.num_tokens, case.num_tokens)

    lens = np.zeros(b.max_num_reqs, np.int32)
    table = np.full((b.max_num_reqs, b.max_blocks), NULL_BLOCK, np.int32)
    want_slots = np.full(b.max_num_tokens, common.PAD_SLOT)
    for i, (seq, blocks) in enumerate(zip(case.seq_lens, case.tables, strict=True)):
        lens[i] = seq - n * b.block_size
        table[i, : len(blocks[n:])] = blocks[n:]
        for token, position in enumerate(range(computed[i], seq), case.starts[i]):
            block, offset = divmod(position, b.block_size)
            want_slots[token] = blocks[block] * b.block_size + offset
    assert_same(suffix.query_start_loc, batch.query_start_loc)
    assert_same(suffix.seq_lens, lens)
    assert_same(suffix.block_table, table)
    assert_same(suffix.num_reqs, case.num_reqs)
    assert_same(suffix.num_tokens, case.num_tokens)
    # Both tables give the tokens the same slots.
    assert_same(slots, want_slots)


@pytest.mark.parametrize("num_common_blocks", [5, 9, -1, np.int32(5), np.array(5)])
def test_num_common_blocks_out_of_range_raises(num_common_blocks):
    batch = BatchMetadata.from_host(
        [1], [16], [[1, 2, 3, 4]], max_num_reqs=1, max_num_tokens=1, max_blocks=4, block_size=4
    )
    assert cascade.build(batch, 4).prefix.seq_lens.tolist() == [16]
    message = rf"num_common_blocks must be in \[0, 4\], .* got {num_common_blocks}"
    with pytest.raises(ValueError, match=message):
        cascade.build(batch, num_common_blocks)


@pytest.mark.parametrize(
    ("common_blocks", "computed", "want"),
    [
        (4, [64, 80], 4),
        (4, [63, 80], 3),
        (2, [64, 80], 2),
        (4, [15, 80], 0),
        (0, [99], 0),
        (3, [], 0),
    ],
)
def test_common_prefix_blocks(common_blocks, computed, want):
    assert common_prefix_blocks(common_blocks, computed, 16) == want


LAYER = {"block_size": 16, "num_query_heads": 32, "num_kv_heads": 8, "num_sms": 132}


@pytest.mark.parametrize(
    ("blocks", "query_lens", "changes", "want"),
    [
        (16, [2] * 8, {}, True),
        (15, [2] * 8, {}, False),  # 240 tokens: too short
        (16, [2] * 7, {}, False),  # too few requests
        (16, [2] * 8, {"full_attention": False}, False),
        (16, [2] * 8, {"dcp_world_size": 2}, False),
        (16, [1] * 8, {"num_kv_heads": 32}, True),  # no group of heads to pack
        (16, [1] * 7 + [2], {}, True),
        # Decodes: 1 wave of 2 tiles, against 8 * 8 * 2 = 128 blocks, or 9 * 8 * 2 = 144.
        (16, [1] * 8, {}, False),
        (16, [1] * 9, {}, False),
        (16, [1] * 17, {}, True),  # 272 blocks make 3 waves
        (16, [1] * 8, {"num_sms": 32}, True),  # 2 against 4
        (16, [1] * 129, {"num_sms": 60}, True),  # 4 against 35
    ],
)
def test_use_cascade_examples(blocks, query_lens, changes, want):
    assert use_cascade(blocks, query_lens, **(LAYER | changes)) is want


@every_batch
@given(
    st.integers(0, 64),
    st.lists(st.integers(1, 2), max_size=300) | st.integers(0, 300).map(lambda n: [1] * n),
    st.sampled_from([(8, 8), (32, 8), (512, 2)]),
    st.sampled_from([16, 60, 132]),
)
def test_use_cascade(blocks, query_lens, heads, sms):
    prefix, reqs = 16 * blocks, len(query_lens)
    want = prefix >= 256 and reqs >= 8
    if want and heads[0] > heads[1] and set(query_lens) == {1}:
        tiles = math.ceil(prefix / 128)
        cascade = math.ceil(heads[0] * math.ceil(reqs / 128) / sms) * tiles
        packed = math.ceil(heads[0] // heads[1] / 128)
        want = cascade < math.ceil(reqs * heads[1] * packed * tiles / sms)
    got = use_cascade(
        blocks, query_lens,
        block_size=16, num_query_heads=heads[0], num_kv_heads=heads[1], num_sms=sms,
    )  # fmt: skip
    assert got is want
