"""metadata.prefix_lm against ranges searched token by token."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import flex, prefix_lm, triton
from jaxkv.metadata.common import BatchMetadata
from jaxkv.metadata.prefix_lm import Feature, prefix_ranges
from tests.util.batches import Case, assert_same, cases, every_batch

MAX_RANGES = 6


@functools.cache
def compiled():
    return jax.jit(prefix_lm.build)


def random_features(rng: np.random.Generator, seq_len: int) -> list[Feature]:
    """Up to three, with up to two runs of embeddings each."""
    features, position = [], 0
    for _ in range(rng.integers(0, 4)):
        offset = position + int(rng.integers(0, 4))
        length = int(rng.integers(1, 9))
        position = offset + length
        if position > seq_len:
            break
        is_embed = None
        if rng.random() < 0.5:
            is_embed = np.ones(length, bool)
            is_embed[rng.integers(0, length)] = False
        modality = rng.choice(["image", "video", "audio"])
        features.append(Feature(str(modality), offset, length, is_embed))
    return features


def ranges_by_hand(
    features: list[Feature], window: int | None, modulus: int
) -> list[tuple[int, int]]:
    ranges = []
    for modality, offset, length, is_embed in features:
        if modality == "audio":
            continue
        if modulus:
            tokens = list(range(offset, offset + length))[modulus - 1 - offset % modulus :]
            if tokens and (window is None or len(tokens) <= window):
                ranges.append((tokens[0], tokens[-1]))
            continue
        start = None
        for i in range(length + 1):
            embeds = i < length and (is_embed is None or is_embed[i])
            if embeds and start is None:
                start = offset + i
            if not embeds and start is not None:
                if window is None or offset + i - start <= window:
                    ranges.append((start, offset + i - 1))
                start = None
    return ranges


@every_batch
@given(
    cases(),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 4]),
    st.integers(0, 2**32 - 1),
)
def test_ranges(case: Case, window: int | None, clamp: bool, modulus: int, seed: int):
    rng = np.random.default_rng(seed)
    b = case.bounds
    features = [random_features(rng, seq) for seq in case.seq_lens]
    ranges = prefix_ranges(
        features,
        max_num_reqs=b.max_num_reqs,
        max_ranges=MAX_RANGES,
        sliding_window=window,
        clamp_sliding_window=clamp,
        span_leading_pad_modulus=modulus,
    )
    by_hand = [ranges_by_hand(own, None if clamp else window, modulus) for own in features]
    want = np.zeros((b.max_num_reqs, MAX_RANGES, 2), np.int32)
    for row, own in enumerate(by_hand):
        for i, bounds in enumerate(own):
            want[row, i] = bounds
    assert_same(ranges, want)

    of_token = np.full((b.max_num_tokens, 2), -1, np.int32)
    for row, (query, seq) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for first, last in by_hand[row]:
            for position in range(max(first, seq - query), last + 1):
                if first < last:
                    of_token[case.starts[row] + position - (seq - query)] = first, last
    assert_same(compiled()(case.batch(), ranges), of_token)


def test_examples():
    features = [
        [Feature("image", 2, 3), Feature("audio", 6, 2)],
        [],
        [Feature("video", 0, 6, [True, True, False, True, False, True])],
    ]
    ranges = prefix_ranges(features, max_num_reqs=4, max_ranges=3)
    assert_same(
        ranges,
        [[(2, 4), (0, 0), (0, 0)], [(0, 0)] * 3, [(0, 1), (3, 3), (5, 5)], [(0, 0)] * 3],
    )
    batch = BatchMetadata.from_host(
        [4, 1, 4], [8, 1, 4], [[1], [2], [3]],
        max_num_reqs=4, max_num_tokens=10, max_blocks=1, block_size=8,
    )  # fmt: skip
    # Request 0 computes positions 4 to 7, request 2 positions 0 to 3, of which 3 is alone.
    no = (-1, -1)
    assert_same(
        prefix_lm.build(batch, ranges), [(2, 4), no, no, no, no, (0, 1), (0, 1), no, no, no]
    )


def test_sliding_window_omits_longer_ranges():
    features = [[Feature("image", 0, 4), Feature("image", 4, 5)]]
    ranges = prefix_ranges(features, max_num_reqs=1, max_ranges=2, sliding_window=4)
    assert_same(ranges, [[(0, 3), (0, 0)]])


@pytest.mark.parametrize("offset", range(4))
def test_range_of_a_padded_span_includes_separators(offset):
    embeds = np.pad(np.ones(368, bool), 8)
    ranges = prefix_ranges(
        [[Feature("image", offset, 384, embeds)]],
        max_num_reqs=1,
        max_ranges=1,
        sliding_window=128,
        clamp_sliding_window=True,
        span_leading_pad_modulus=4,
    )
    assert_same(ranges, [[(3, offset + 383)]])


def test_negative_modulus_raises():
    with pytest.raises(ValueError, match="span_leading_pad_modulus must be >= 0 tokens, got -1"):
        prefix_ranges([[]], max_num_reqs=1, max_ranges=1, span_leading_pad_modulus=-1)


def test_zero_ranges():
    batch = BatchMetadata.from_host(
        [2], [2], [[1]], max_num_reqs=1, max_num_tokens=3, max_blocks=1, block_size=2
    )
    ranges = prefix_ranges([[]], max_num_reqs=1, max_ranges=0)
    assert_same(prefix_lm.build(batch, ranges), [(-1, -1)] * 3)


HEADS = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8}
READERS = {
    "prefix_lm": prefix_lm.build,
    "flex": lambda batch, ranges: flex.build(batch, num_blocks=9, mm_prefix_range=ranges),
    "triton": lambda batch, ranges: triton.build(batch, **HEADS, mm_prefix_range=ranges),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("shape", [(2, 1, 2), (8, 1, 2), (4, 1, 3), (4, 2), (4, 1, 2, 1)])
def test_ranges_of_wrong_shape_raise(reader, shape):
    batch = BatchMetadata.from_host(
        [2] * 4, [8] * 4, [[1], [2], [3], [4]],
        max_num_reqs=4, max_num_tokens=8, max_blocks=1, block_size=8,
    )  # fmt: skip
    READERS[reader](batch, np.zeros((4, 1, 2), np.int32))
    with pytest.raises(ValueError, match=r"must be \[4 rows, ranges, 2\], got ") as error:
        READERS[reader](batch, np.zeros(shape, np.int32))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("reader", READERS)
def test_ranges_that_are_not_int32_raise(reader):
    batch = BatchMetadata.from_host(
        [2], [2], [[1]], max_num_reqs=1, max_num_tokens=3, max_blocks=1, block_size=2
    )
    with pytest.raises(ValueError, match="must be int32, got float32"):
        READERS[reader](batch, np.zeros((1, 1, 2), np.float32))
    with pytest.raises(ValueError, match="must fit int32, got 4294967296 "):
        READERS[reader](batch, np.array([[[2**32, 2**32 + 5]]]))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([[], []], "2 requests exceed max_num_reqs=1"),
        (
            [[Feature("image", 0, 2), Feature("image", 2, 2)]],
            "request 0: 2 ranges exceed max_ranges=1",
        ),
        ([[Feature("image", 4, 2), Feature("audio", 0, 5)]], "overlap at position 4"),
        (
            [[Feature("image", 4, 2, [True] * 8), Feature("image", 7, 2)]],
            r"image at 4 must have shape \(2,\), .* got \(8,\)",
        ),
        ([[Feature("video", 4, 10, [True] * 3)]], r"is_embed .* shape \(10,\), .* got \(3,\)"),
        (
            [[Feature("image", 4, 3, np.array([2, 2, 0]))]],
            r"is_embed .* 0 or 1, got \[2, 2, 0\]",
        ),
        ([[Feature("image", 4, 2, np.array([257, 1]))]], r"False, True, 0 or 1, got \[257, 1\]"),
        ([[Feature("image", -3, 5)]], r"image feature at -3 of 5 tokens .* in \[0, 2\*\*31\)"),
        ([[Feature("audio", 3, -1)]], "audio feature at 3 of -1 tokens"),
        ([[Feature("image", 2**31 - 1, 2)]], "image feature at 2147483647 of 2 tokens"),
    ],
)
def test_invalid_features_raise(features, message):
    with pytest.raises(ValueError, match=message):
        prefix_ranges(features, max_num_reqs=1, max_ranges=1)


@pytest.mark.parametrize("offset, length, name", [(1.5, 2, "offset"), (1, np.float32(2), "length")])
def test_positions_that_are_not_integers_raise(offset: Any, length: Any, name):
    feature = Feature("image", offset, length)
    with pytest.raises(TypeError, match=f"request 0: {name} of feature image must be an integer"):
        prefix_ranges([[feature]], max_num_reqs=1, max_ranges=1)
