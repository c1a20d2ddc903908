"""Metadata for verifying a tree of drafts: a bias that lets each draft see its own branch.

Follows vLLM's tree attention, as long as it had it. A tree is a list of choices: (0,) is the first
child of the root, (0, 1) the second child of that. The root is the last accepted token; it and the
drafts, in the order of the list, are the query tokens of a decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata, split_decodes_and_prefills
from jaxkv.metadata.segments import rows_from, starts_from


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeMetadata:
    """A batch in two parts, tokens of the decodes first.

    Attributes:
      decode: the rows that verify a tree, up to L query tokens each.
      prefill: the other rows; its tokens count from the first of them.
      tree_attn_bias: float32[L, L], what to add to the scores of the last L tokens of a decode's
        context, for each of its query tokens; earlier tokens of the context get nothing added.
    """

    decode: BatchMetadata
    prefill: BatchMetadata
    tree_attn_bias: Any


def tree_attn_bias(selections: Sequence[tuple[int, ...]]) -> np.ndarray:
    """float32[L, L] of a tree of L - 1 drafts: 0 where a token sees another, -inf elsewhere.

    Args:
      choices: the drafts, parents before their children.

    Raises:
      ValueError: a draft that is there twice, or whose parent is not before it.
    """
    index: dict[tuple[int, ...], int] = {(): 0}
    bias = np.full((len(selections) + 1, len(selections) + 1), -np.inf, np.float32)
    bias[0, 0] = 0
    for i, selection in enumerate(map(tuple, selections), start=1):
        parent = index.get(selection[:-1])
        if selection in index or parent is None:
            raise ValueError(f"choices[{i - 1}]={selection}: twice, or not after its parent")
        bias[i] = bias[parent]
        bias[i, i] = 0
        index[selection] = i
    return bias


def build(batch: BatchMetadata, bias: Any) -> TreeMetadata:
    """The metadata of a batch: rows with up to L query tokens, from the first on, are decodes.

    Args:
      batch: the batch, decodes first (see `reorder_batch`).
      bias: float32[L, L], `tree_attn_bias`.
    """
    split = split_decodes_and_prefills(batch, bias.shape[0])
    return TreeMetadata(
        decode=_part(batch, 0, split.num_decodes, split.num_decode_tokens),
        prefill=_part(batch, split.num_decodes, split.num_prefills, split.num_prefill_tokens),
        tree_attn_bias=bias,
    )


def build_for_drafting(
    batch: BatchMetadata, bias: Any, *, draft_index: int, query_len: int
) -> TreeMetadata:
    """The metadata of a step that drafts a level of the tree.

    The first one goes on from the last accepted tokens, all of it prefill. Later ones take the
    `query_len` drafts that there are so far, without the root.

    Args:
      batch: the batch.
      bias: float32[L, L], `tree_attn_bias`.
      draft_index: which level, from 0.
      query_len: query tokens of a row; no matter at level 0.

    Raises:
      ValueError: a level below 0, or more query tokens than the tree has drafts.
    """
    if draft_index < 0:
        raise ValueError(f"draft_index must be >= 0, got {draft_index}")
    if draft_index and not 1 <= query_len < bias.shape[0]:
        raise ValueError(
            f"query_len={query_len} tokens are outside [1, {bias.shape[0]}): the tree has "
            f"{bias.shape[0] - 1} drafts"
        )
    drafts = slice(1, 1 + query_len) if draft_index else slice(0)
    return build(batch, bias[drafts, drafts])


def _part(batch: BatchMetadata, first: Any, count: Any, num_tokens: Any) -> BatchMetadata:
    return dataclasses.replace(
        batch,
        query_start_loc=starts_from(batch.query_start_loc, first, count),
        seq_lens=rows_from(batch.seq_lens, first, count),
        block_table=rows_from(batch.block_table, first, count, fill=NULL_BLOCK),
        num_reqs=count,
        num_tokens=num_tokens,
    )
