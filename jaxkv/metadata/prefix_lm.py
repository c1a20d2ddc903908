"""Prefix-LM ranges: tokens of an image or video that attend to each other in both directions.

The host knows from a request's features where its ranges lie; the device finds the range of each
query token. Follows vLLM's compute_mm_prefix_ranges, compute_mm_prefix_range_tensor and
fill_mm_prefix_query_ranges, with a static number of ranges a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.checks import check_rows
from jaxkv.metadata.common import BatchMetadata, token_positions, token_to_request
from jaxkv.metadata.segments import on_device

NO_RANGE = -1  # start and end for a token that lies in no range


class Feature(NamedTuple):
    """A multimodal input's place in its request.

    Attributes:
      modality: what it is; an "image" or "video" has ranges.
      offset: position of its first token.
      length: tokens.
      is_embed: bool[length], tokens that stand for its embeddings, others separate them; None if
        all do.
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
) -> np.ndarray:
    """The ranges of each request, on the host: runs of embeddings in its images and videos.

    Args:
      features: of each request; they must not overlap.
      max_num_reqs: B.
      max_ranges: R, the most ranges of a request.
      sliding_window: tokens of the layers' window; longer ranges are left out, as their first
        tokens would see past it. None keeps them, for full attention and for kernels that clamp.

    Returns:
      int32[B, R, 2], first and last position of each range; (0, 0) behind them and in padding rows.
      A range with its first position at its last holds no pair of tokens, and counts as none.

    Raises:
      ValueError: more requests than B, more ranges than R, features that overlap, or an `is_embed`
        that does not say of each of its feature's tokens True or False (1 or 0).
    """
    if len(features) > max_num_reqs:
        raise ValueError(f"{len(features)} requests exceed max_num_reqs={max_num_reqs}")
    out = np.zeros((max_num_reqs, max_ranges, 2), np.int32)
    for i, own in enumerate(features):
        _refuse_overlap(i, own)
        ranges = [
            (first, last)
            for feature in own
            if feature.modality in ("image", "video")
            for first, last in _embed_ranges(i, feature)
            if sliding_window is None or last - first + 1 <= sliding_window
        ]
        if len(ranges) > max_ranges:
            raise ValueError(f"request {i} has {len(ranges)} ranges, max_ranges={max_ranges}")
        if ranges:
            out[i, : len(ranges)] = ranges
    return out


def _refuse_overlap(request: int, features: Sequence[Feature]) -> None:
    placed = sorted(features, key=lambda feature: feature.offset)
    for one, following in itertools.pairwise(placed):
        if one.offset + one.length > following.offset:
            raise ValueError(
                f"request {request} has {one.modality} and {following.modality} features that "
                f"overlap at position {following.offset}"
            )


def _embed_ranges(request: int, feature: Feature) -> list[tuple[int, int]]:
    """First and last position of each run of embeddings."""
    embeds = np.ones(feature.length) if feature.is_embed is None else np.asarray(feature.is_embed)
    what = f"request {request} has a feature {feature.modality} at {feature.offset} with"
    if embeds.shape != (feature.length,):
        raise ValueError(
            f"{what} is_embed of shape {embeds.shape}, not one entry for each of "
            f"length={feature.length} tokens"
        )
    if not np.isin(embeds, (0, 1)).all():
        raise ValueError(
            f"{what} is_embed={embeds.tolist()}, whose entries must be bool, or 0 or 1"
        )
    steps = np.diff(np.concatenate([[0], embeds.astype(np.int8), [0]]))
    first, behind = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(feature.offset + first, feature.offset + behind - 1, strict=True))


def build(batch: BatchMetadata, ranges: Any) -> Any:
    """The range that holds each query token.

    Args:
      batch: the batch.
      ranges: int32[B, R, 2], see `prefix_ranges`; those of a request do not overlap.

    Returns:
      int32[T, 2], first and last position; NO_RANGE twice for tokens outside and for padding.

    Raises:
      ValueError: `ranges` of another shape.
    """
    check_rows("ranges", ranges, batch.max_num_reqs, "ranges", 2)
    token = jnp.arange(batch.max_num_tokens, dtype=jnp.int32)
    row = token_to_request(batch.query_start_loc, batch.max_num_tokens)
    position = token_positions(batch)[:, None]
    own = on_device(ranges)[row]
    first, last = own[..., 0], own[..., 1]
    holds = (first < last) & (first <= position) & (position <= last)
    holds &= (token < batch.query_start_loc[-1])[:, None]
    # At most one range holds a token, so that the largest entry is that range's.
    return jnp.max(jnp.where(holds[..., None], own, NO_RANGE), axis=1, initial=NO_RANGE)
