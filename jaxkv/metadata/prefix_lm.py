"""Prefix-LM ranges: bidirectional attention among the tokens of an image or video.

The host computes the ranges of a request from its multimodal features; the device finds the range
of each query token. Follows vLLM's compute_mm_prefix_ranges, compute_mm_prefix_range_tensor and
fill_mm_prefix_query_ranges, with a static number of ranges per request.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.checks import check_rows
from jaxkv.metadata.common import BatchMetadata, check_batch, token_positions, token_to_request
from jaxkv.metadata.segments import Array, int32_on_device

NO_RANGE = -1  # first and last position for a token outside all ranges


class Feature(NamedTuple):
    """Position of a multimodal input in its request.

    Attributes:
      modality: type of the input; "image" and "video" have ranges.
      offset: position of its first token.
      length: number of tokens.
      is_embed: bool[length], True for placeholders of embeddings, False for separators; None if
        all tokens are placeholders.

    Example: `Feature("image", offset=5, length=384)`.
    """

    modality: str
    offset: int
    length: int
    is_embed: Sequence[bool] | np.ndarray | None = None


def prefix_ranges(
    features: Sequence[Sequence[Feature]],
    *,
    max_num_reqs: int,
    max_ranges: int,
    sliding_window: int | None = None,
    clamp_sliding_window: bool = False,
    span_leading_pad_modulus: int = 0,
) -> np.ndarray:
    """Ranges of each request: consecutive embeddings of its images and videos; on the host.

    Args:
      features: multimodal features of each request; they must not overlap.
      max_num_reqs: B.
      max_ranges: R, upper bound of ranges per request.
      sliding_window: window of the layers in tokens; longer ranges are omitted, because their first
        tokens would see past the window. None for full attention.
      clamp_sliding_window: whether the kernel limits ranges to the window itself; longer ranges are
        then kept, as by vLLM's `mm_prefix_clamp_sliding_window`.
      span_leading_pad_modulus: M for models whose features begin with M - 1 - offset % M tokens of
        padding, which align the rest for a compressor; each feature then has one range, from its
        first token after the padding to its last, separators included. 0 for no padding. As vLLM's
        `mm_prefix_span_leading_pad_modulus`: 4 for DeepSeek-V4, 2 for V4.1.

    Returns:
      int32[B, R, 2], first and last position of each range, padded with (0, 0). A range of a single
      position (first == last) has no effect.

    Raises:
      TypeError: an offset or a length that is not an integer.
      ValueError: more requests than B, more ranges than R, overlapping features, a negative offset,
        length or modulus, a feature whose positions exceed int32, or an `is_embed` that is not one
        boolean (or 0 or 1) for each token of its feature.

    Example: `prefix_ranges([[Feature("image", 5, 384)]], max_num_reqs=1, max_ranges=1)` is
    [[[5, 388]]]; with a modulus of 4, [[[7, 388]]].
    """
    if span_leading_pad_modulus < 0:
        raise ValueError(
            f"span_leading_pad_modulus must be >= 0 tokens, got {span_leading_pad_modulus}"
        )
    limit = None if clamp_sliding_window else sliding_window
    if len(features) > max_num_reqs:
        raise ValueError(f"{len(features)} requests exceed max_num_reqs={max_num_reqs}")
    out = np.zeros((max_num_reqs, max_ranges, 2), np.int32)
    for i, own in enumerate(features):
        _check_positions(i, own)
        _check_no_overlap(i, own)
        ranges = [
            (first, last)
            for feature in own
            if feature.modality in ("image", "video")
            for first, last in _ranges(i, feature, span_leading_pad_modulus)
            if limit is None or last - first + 1 <= limit
        ]
        if len(ranges) > max_ranges:
            raise ValueError(f"request {i}: {len(ranges)} ranges exceed max_ranges={max_ranges}")
        if ranges:
            out[i, : len(ranges)] = ranges
    return out


def _check_positions(request: int, features: Sequence[Feature]) -> None:
    for modality, *place, _ in features:
        for name, value in zip(("offset", "length"), place, strict=True):
            if not hasattr(value, "__index__"):
                raise TypeError(
                    f"request {request}: {name} of feature {modality} must be an integer, got "
                    f"{type(value).__name__}"
                )
        if min(place) < 0 or sum(place) > 2**31:
            raise ValueError(
                f"request {request}: {modality} feature at {place[0]} of {place[1]} tokens must be "
                "at positions in [0, 2**31)"
            )


def _check_no_overlap(request: int, features: Sequence[Feature]) -> None:
    placed = sorted(features, key=lambda feature: feature.offset)
    for one, following in itertools.pairwise(placed):
        if one.offset + one.length > following.offset:
            raise ValueError(
                f"request {request} has {one.modality} and {following.modality} features that "
                f"overlap at position {following.offset}"
            )


def _ranges(request: int, feature: Feature, modulus: int) -> list[tuple[int, int]]:
    """Ranges of one feature; none if it ends within its leading padding."""
    embeds = _embed_ranges(request, feature)
    if not modulus:
        return embeds
    first = feature.offset // modulus * modulus + modulus - 1
    last = feature.offset + feature.length - 1
    return [(first, last)] if first <= last else []


def _embed_ranges(request: int, feature: Feature) -> list[tuple[int, int]]:
    """First and last position of each sequence of consecutive embeddings."""
    embeds = np.ones(feature.length) if feature.is_embed is None else np.asarray(feature.is_embed)
    argument = f"request {request}: is_embed of feature {feature.modality} at {feature.offset}"
    if embeds.shape != (feature.length,):
        raise ValueError(
            f"{argument} must have shape ({feature.length},), one entry per token, got "
            f"{embeds.shape}"
        )
    if not np.isin(embeds, (0, 1)).all():
        raise ValueError(f"{argument} must have entries False, True, 0 or 1, got {embeds.tolist()}")
    steps = np.diff(np.concatenate([[0], embeds.astype(np.int8), [0]]))
    first, end = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(feature.offset + first, feature.offset + end - 1, strict=True))


def build(batch: BatchMetadata, ranges: Array) -> jax.Array:
    """The range of each query token.

    Args:
      batch: the batch.
      ranges: int32[B, R, 2], see `prefix_ranges`; ranges of one request must not overlap.

    Returns:
      int32[T, 2], first and last position; NO_RANGE for both outside all ranges and for padding.

    Raises:
      ValueError: `ranges` of the wrong shape or not integers.

    Example: `prefix_lm.build(batch, np.array([[[8, 9]], [[10, 11]], [[0, 0]], [[0, 0]]]))`.
    """
    check_batch("prefix_lm.build", batch)
    check_rows("ranges", ranges, batch.max_num_reqs, "ranges", 2)
    token = jnp.arange(batch.max_num_tokens, dtype=jnp.int32)
    row = token_to_request(batch.query_start_loc, batch.max_num_tokens)
    position = token_positions(batch)[:, None]
    own = int32_on_device("ranges", ranges)[row]
    first, last = own[..., 0], own[..., 1]
    inside = (first < last) & (first <= position) & (position <= last)
    inside &= (token < batch.query_start_loc[-1])[:, None]
    # A token is in at most one range, so the maximum selects its entry.
    return jnp.max(jnp.where(inside[..., None], own, NO_RANGE), axis=1, initial=NO_RANGE)
