"""Scheduler helpers on the host: batch order, bounds of context lengths, chunks of prefills.

NumPy only, without access to the device. Semantics follow vLLM's batch reordering and its helpers
for chunked prefills.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxkv.metadata.checks import check_threshold, integers

# Regions of a batch, in order.
_DECODE, _SHORT_EXTEND, _LONG_EXTEND, _PREFILL = range(4)


def reorder_batch(
    num_scheduled: Sequence[int] | np.ndarray,
    num_computed: Sequence[int] | np.ndarray,
    num_prompt: Sequence[int] | np.ndarray,
    decode_threshold: int,
) -> np.ndarray:
    """Order of a batch with decodes first, then short extends, long extends and prefills.

    A request without computed tokens is a prefill; one with more than `decode_threshold` scheduled
    tokens a long extend; one that is still in its prompt a short extend; any other a decode.
    Requests already in their region stay in place and the others are permuted, which minimizes
    moves of persistent row state. The sort is therefore not stable.

    Args:
      num_scheduled: query tokens of each request in this step.
      num_computed: tokens of each request computed in earlier steps.
      num_prompt: prompt length of each request in tokens.
      decode_threshold: maximum number of query tokens of a decode.

    Returns:
      int64[requests]: `order[i]` is the request to place in row i; `np.arange` for no change.

    Raises:
      ValueError: a threshold below 0, or arguments that are not integers in one dimension, or of
        different lengths.

    Example: `reorder_batch([5, 1, 1], [0, 9, 7], [5, 8, 6], 1)` is [2, 1, 0].
    """
    check_threshold(decode_threshold)
    scheduled = integers("num_scheduled", num_scheduled)
    computed, prompt = integers("num_computed", num_computed), integers("num_prompt", num_prompt)
    if not len(scheduled) == len(computed) == len(prompt):
        raise ValueError(
            "num_scheduled, num_computed and num_prompt must have equal lengths, got "
            f"{len(scheduled)}, {len(computed)} and {len(prompt)} requests"
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
    """Upper bound of `BatchMetadata.seq_lens` on the host, without a host sync.

    Exact for prefills, and for all requests without speculative decoding. The host counts all draft
    tokens as accepted until it knows the result, so the context of a decode may be shorter: use the
    bound for shapes and sizes, not instead of `seq_lens`.

    Args:
      num_scheduled: query tokens of each request in this step.
      num_computed: tokens of each request computed in earlier steps, as counted by the host.
      max_num_reqs: B.

    Returns:
      int32[B], 0 in padding rows.

    Raises:
      ValueError: more requests than B, arguments that are not integers in one dimension, or of
        different lengths, or a context of 2**31 tokens or more.

    Example: `seq_lens_upper_bound([1, 5], [32, 0], max_num_reqs=4)` is [33, 5, 0, 0].
    """
    scheduled = integers("num_scheduled", num_scheduled)
    computed = integers("num_computed", num_computed)
    if not len(scheduled) == len(computed) <= max_num_reqs:
        raise ValueError(
            f"num_scheduled and num_computed must have equal lengths of at most {max_num_reqs=}, "
            f"got {len(scheduled)} and {len(computed)} requests"
        )
    total = scheduled + computed
    if np.any(total >= 2**31):
        i = int(total.argmax())
        raise ValueError(
            f"request {i}: num_scheduled={scheduled[i]} and num_computed={computed[i]} tokens "
            "exceed a context of 2**31 - 1 tokens"
        )
    bound = np.zeros(max_num_reqs, np.int32)
    bound[: len(total)] = total
    return bound


def split_prefill_chunks(
    seq_lens: Sequence[int] | np.ndarray, workspace: int, offset: int = 0
) -> list[tuple[int, int]]:
    """Splits consecutive requests into the minimum number of chunks that fit a workspace.

    Args:
      seq_lens: context length of each request in tokens.
      workspace: capacity of the workspace in tokens.
      offset: row of the first request in its batch.

    Returns:
      The rows [first, last) of each chunk, filled greedily from the left.

    Raises:
      ValueError: a single request exceeds the workspace, or `seq_lens` are not integers.

    Example: `split_prefill_chunks([4, 3, 6], 8)` is [(0, 2), (2, 3)].
    """
    chunks: list[tuple[int, int]] = []
    first, used = 0, 0
    for i, length in enumerate(integers("seq_lens", seq_lens).tolist()):
        if length > workspace:
            raise ValueError(f"request {i}: {length} tokens exceed workspace={workspace} tokens")
        if used + length > workspace:
            chunks.append((first + offset, i + offset))
            first, used = i, 0
        used += length
    if len(seq_lens) > first:
        chunks.append((first + offset, len(seq_lens) + offset))
    return chunks
