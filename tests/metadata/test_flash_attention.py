"""metadata.flash_attention against the prepare kernel, in slow Python, on random batches."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxkv.metadata import flash_attention
from tests.util.batches import FEW, ONE, SOME, Case, assert_same, cases, every_batch


@dataclasses.dataclass(frozen=True)
class Options:
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_m: int = 4
    block_n: int = 4
    num_splits: int = 5
    num_sms: int = 30
    pack_gqa: bool = True
    causal: bool = True
    local: bool = False


OPTIONS = (
    Options(),
    Options(causal=False, num_sms=132),
    Options(causal=False, local=True, num_splits=16, block_n=2),
    Options(num_splits=1, pack_gqa=False, head_dim=65536),
    Options(num_q_heads=2, num_splits=3, pack_gqa=False, num_sms=7, block_m=3, head_dim=16384),
)


@functools.cache
def compiled(options: Options):
    return jax.jit(functools.partial(flash_attention.build, **dataclasses.asdict(options)))


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def by_hand(case: Case, options: Options):
    """Rows (splits, query tiles, row, heads in L2), in the order of the kernel."""
    size = case.bounds.max_num_reqs
    query = case.query_lens + [0] * (size - case.num_reqs)
    seq = case.seq_lens + [0] * (size - case.num_reqs)
    group = options.num_q_heads // options.num_kv_heads
    heads = options.num_kv_heads if options.pack_gqa else options.num_q_heads
    m = [ceil(q * (group if options.pack_gqa else 1), options.block_m) for q in query]
    n = [ceil(s, options.block_n) for s in seq]
    tiles = np.float32(sum(a * b for a, b in zip(m, n, strict=True)))
    share = tiles * np.float32(1.1) * np.float32(heads) / np.float32(options.num_sms)
    capacity = 8 * 2**20 // (options.block_n * 2 * options.head_dim * 2)
    rows = []
    for row in range(size):
        splits = 1
        if options.num_splits > 1 and tiles:
            splits = max(min(ceil(n[row], math.ceil(share)), options.num_splits), 1)
        parts = ceil(n[row], splits)
        key = parts * options.block_n - m[row] * options.block_m if options.causal else parts
        in_l2 = next((h for h in (16, 8, 4, 2) if max(parts, 1) * h <= capacity), 1)
        in_l2 = min(in_l2 * (1 if options.pack_gqa else group), heads)
        rows.append((-key, (splits, m[row], row, in_l2)))
    if not options.local:
        rows.sort(key=lambda entry: entry[0])
    return [row for _, row in rows]


# Tiles of two heads and the margin are 330: 11 for each of 30 SMs, or 12 by the reciprocal of 30.
EXACT_SHARE = [7, 24, 16, 5, 32, 16, 1, 3, 24, 8, 8, 32, 8, 24, 32, 8, 8, 32, 8]


@example(Case([1] * 19, EXACT_SHARE, [[1] * 5] * 19, SOME), OPTIONS[2])
@every_batch
@given(cases(bounds=(ONE, FEW, FEW, SOME)), st.sampled_from(OPTIONS))
def test_build(case: Case, options: Options):
    got = compiled(options)(case.batch())
    splits, m_blocks, order, in_l2 = (list(x) for x in zip(*by_hand(case, options), strict=True))
    assert_same(got.num_splits_dynamic, splits)
    assert_same(got.num_m_blocks, m_blocks)
    vectors = [splits, m_blocks]
    assert (got.varlen_batch_idx is None) == options.local
    if not options.local:
        assert_same(got.varlen_batch_idx, order)
        vectors.append(order)
    assert (got.num_nheads_in_l2 is None) == (not options.causal and not options.local)
    if got.num_nheads_in_l2 is not None:
        assert_same(got.num_nheads_in_l2, in_l2)
        vectors.append(in_l2)
    pad = [0] * (-len(splits) % 4)
    assert_same(got.packed, [x for vector in vectors for x in [*vector, *pad]] + [0])


def test_a_long_context_is_split():
    case = Case([1, 1], [24, 2], [[1, 2, 3, 4, 5, 6], [7]], FEW)
    got = compiled(Options(causal=False, num_splits=16))(case.batch())
    # 7 tiles of 2 heads on 30 SMs: a tile each.
    assert got.num_splits_dynamic[got.varlen_batch_idx.tolist().index(0)] == 6
    assert got.packed.shape == (3 * 8 + 1,)


def test_invalid_arguments_raise():
    batch = Case([1], [1], [[1]], FEW).batch()
    options = dataclasses.asdict(Options())
    for change, message in (
        ({"num_kv_heads": 3}, "num_q_heads=8 must be a multiple of num_kv_heads=3"),
        ({"local": True}, "causal and local exclude each other"),
        ({"block_n": 0}, "block_n must be >= 1, got 0"),
        ({"num_splits": 0}, "num_splits must be >= 1, got 0"),
        ({"pack_gqa": False}, "pack_gqa must be True with num_splits=5, got False"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attention.build(batch, **(options | change))
    wide = Case([1], [1], [[1]], FEW._replace(max_num_reqs=993)).batch()
    with pytest.raises(ValueError, match="993 rows exceed the 992 rows"):
        flash_attention.build(wide, **options)
