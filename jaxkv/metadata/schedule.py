"""The host's side of a batch: its order, bounds of its lengths, and its prefills in chunks.

For a scheduler, in NumPy: nothing here waits for the device or reads from it. Semantics are those
of vLLM's batch reordering and of its helpers for chunked prefills.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Regions of a batch, in their order.
_DECODE, _SHORT_EXTEND, _LONG_EXTEND, _PREFILL = range(4)


def reorder_batch(
    num_scheduled: Sequence[int] | np.ndarray,
    num_computed: Sequence[int] | np.ndarray,
    num_prompt: Sequence[int] | np.ndarray,
    decode_threshold: int,
) -> np.ndarray:
    """The order that puts decodes first, then short extends, long extends and prefills.

    A request without computed tokens is a prefill, one that is to compute more than
    `decode_threshold` tokens a long extend, one that is still in its prompt a short extend, and any
    other a decode. Requests that lie in the region of their kind stay where they are, and the
    others take each other's places, so that as few rows of persistent state as possible move.
    The result is therefore not a stable sort.

    Args:
      num_scheduled: query tokens of each request in this step.
      num_computed: tokens of each request that earlier steps computed.
      num_prompt: tokens of each request's prompt.
      decode_threshold: the most query tokens of a decode.

    Returns:
      int64[requests]: `order[i]` is the request that comes to place i. `np.arange` if all stay.

    Raises:
      ValueError: the arguments name different numbers of requests.
    """
    scheduled, computed, prompt = map(np.asarray, (num_scheduled, num_computed, num_prompt))
    if not len(scheduled) == len(computed) == len(prompt):
        raise ValueError(
            f"num_scheduled, num_computed and num_prompt name {len(scheduled)}, {len(computed)} "
            f"and {len(prompt)} requests"
        )
    region = np.select(
        [computed == 0, scheduled > decode_threshold, computed < prompt],
        [_PREFILL, _LONG_EXTEND, _SHORT_EXTEND],
        _DECODE,
    )
    order = np.arange(len(region))
    misplaced = np.flatnonzero(region != np.sort(region))
    order[misplaced] = misplaced[np.argsort(region[misplaced], kind="stable")]
    return order


def seq_lens_upper_bound(
    num_scheduled: Sequence[int] | np.ndarray,
    num_computed: Sequence[int] | np.ndarray,
    *,
    max_num_reqs: int,
) -> np.ndarray:
    """What the host can say of `BatchMetadata.seq_lens` without asking the device.

    Exact for requests in their prompt, and for all when nothing is drafted. While the device still
    decides how many drafted tokens it accepts, the host counts them all, and a decode's context may
    be shorter: use it for bounds and sizes, never in place of `seq_lens`.

    Args:
      num_scheduled: query tokens of each request in this step.
      num_computed: tokens of each request that earlier steps computed, as the host counts them.
      max_num_reqs: B.

    Returns:
      int32[B], 0 in padding rows.

    Raises:
      ValueError: more requests than B, the arguments name different numbers of requests, or a
        context of 2**31 tokens or more.
    """
    scheduled, computed = np.asarray(num_scheduled, np.int64), np.asarray(num_computed, np.int64)
    if not len(scheduled) == len(computed) <= max_num_reqs:
        raise ValueError(
            f"num_scheduled and num_computed name {len(scheduled)} and {len(computed)} requests, "
            f"max_num_reqs={max_num_reqs}"
        )
    total = scheduled + computed
    if np.any(total >= 2**31):
        i = int(total.argmax())
        raise ValueError(
            f"request {i} has num_scheduled={scheduled[i]} and num_computed={computed[i]} tokens, "
            "together more than 2**31 - 1, the most of a context"
        )
    bound = np.zeros(max_num_reqs, np.int32)
    bound[: len(total)] = total
    return bound


def split_prefill_chunks(
    seq_lens: Sequence[int] | np.ndarray, workspace: int, offset: int = 0
) -> list[tuple[int, int]]:
    """Consecutive requests in as few chunks as fit a workspace each.

    Args:
      seq_lens: tokens of each request's context.
      workspace: tokens that a chunk may have in all.
      offset: the first request's row in its batch.

    Returns:
      The rows [first, last) of each chunk, left to right, each as long as it can be.

    Raises:
      ValueError: one request alone exceeds the workspace.
    """
    chunks: list[tuple[int, int]] = []
    first, used = 0, 0
    for i, length in enumerate(np.asarray(seq_lens).tolist()):
        if length > workspace:
            raise ValueError(f"request {i} has {length} tokens, the workspace {workspace}")
        if used + length > workspace:
            chunks.append((first + offset, i + offset))
            first, used = i, 0
        used += length
    if len(seq_lens) > first:
        chunks.append((first + offset, len(seq_lens) + offset))
    return chunks
