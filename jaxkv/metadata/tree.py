"""Metadata for tree verification: an attention bias that limits each draft token to its branch.

Follows vLLM's former tree attention backend. A tree is a list of paths: (0,) is the first child of
the root, (0, 1) the second child of that node. The root is the last accepted token. The query
tokens of a decode are the root and the draft tokens, in the order of the list. A decode may have
only the first of them, for example the root alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.common import BatchMetadata, check_batch
from jaxkv.metadata.segments import Array
from jaxkv.metadata.splits import sections, split_decodes_and_prefills


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TreeMetadata:
    """A batch in two parts, decodes first.

    Attributes:
      decode: the rows that verify a tree, with up to L query tokens each.
      prefill: the other rows; token indices are relative to their first token.
      decode_max_query_len: int32[], longest query of the decodes in tokens; 0 without decodes.
      decode_max_seq_len: int32[], longest context of the decodes in tokens; 0 without decodes.
      prefill_max_query_len: int32[], the same of the prefills.
      prefill_max_seq_len: int32[], the same of the prefills.
      tree_attn_bias: float32[L, L], bias of the attention scores of a decode: row i is that of its
        query token i, column j that of the context's token n + j, where n is the number of tokens
        computed in earlier steps (`num_computed_tokens`), whose bias is 0. As the qq_bias of vLLM's
        unified attention. A decode with q query tokens uses the first q rows and columns.
    """

    decode: BatchMetadata
    prefill: BatchMetadata
    decode_max_query_len: jax.Array
    decode_max_seq_len: jax.Array
    prefill_max_query_len: jax.Array
    prefill_max_seq_len: jax.Array
    tree_attn_bias: Array


def tree_attn_bias(selections: Sequence[tuple[int, ...]]) -> np.ndarray:
    """float32[L, L] for a tree of L - 1 draft tokens: 0 for visible tokens, -inf otherwise.

    Args:
      selections: paths of the draft tokens, parents before their children.

    Raises:
      ValueError: a duplicate draft token, or one not preceded by its parent.

    Example: `tree_attn_bias([(0,), (1,)])` is [[0, -inf, -inf], [0, 0, -inf], [0, -inf, 0]].
    """
    index: dict[tuple[int, ...], int] = {(): 0}
    bias = np.full((len(selections) + 1, len(selections) + 1), -np.inf, np.float32)
    bias[0, 0] = 0
    for i, selection in enumerate(map(tuple, selections), start=1):
        parent = index.get(selection[:-1])
        if selection in index or parent is None:
            raise ValueError(
                f"selections[{i - 1}]={selection} must be unique and preceded by its parent"
            )
        bias[i] = bias[parent]
        bias[i, i] = 0
        index[selection] = i
    return bias


def build(batch: BatchMetadata, bias: Array, *, is_prefilling: Array | None = None) -> TreeMetadata:
    """Metadata of a batch; leading rows with up to L query tokens are decodes.

    Args:
      batch: the batch, decodes first (see `reorder_batch`).
      bias: float32[L, L], `tree_attn_bias`.
      is_prefilling: bool[B], rows that are still prefilling: prefills, whatever their number of
        query tokens. They follow the decodes. None if all of them have more than L query tokens;
        a shorter one would be a decode, as in vLLM, whose tokens see only a branch of the tree.

    Raises:
      ValueError: a `bias` that is not square, an `is_prefilling` that is not bool[B], or a batch
        without rows.

    Example: `tree.build(batch, tree.tree_attn_bias([(0,), (1,), (0, 0)]))`.
    """
    check_batch("tree.build", batch)
    _check_square(bias)
    split = split_decodes_and_prefills(
        batch,
        bias.shape[0],
        treat_short_extends_as_decodes=is_prefilling is None,
        is_prefilling=is_prefilling,
    )
    decode, prefill = sections(batch, split)
    return TreeMetadata(
        decode=decode,
        prefill=prefill,
        decode_max_query_len=jnp.max(decode.query_lens),
        decode_max_seq_len=jnp.max(decode.seq_lens),
        prefill_max_query_len=jnp.max(prefill.query_lens),
        prefill_max_seq_len=jnp.max(prefill.seq_lens),
        tree_attn_bias=bias,
    )


def build_for_drafting(
    batch: BatchMetadata, bias: Array, *, draft_index: int, query_len: int
) -> TreeMetadata:
    """Metadata of a step that drafts one level of the tree.

    Level 0 continues from the last accepted tokens and treats all rows as prefills. Later levels
    process the `query_len` draft tokens so far, without the root.

    Example: `tree.build_for_drafting(batch, bias, draft_index=1, query_len=2)`.

    Args:
      batch: the batch.
      bias: float32[L, L], `tree_attn_bias`.
      draft_index: level of the tree, from 0.
      query_len: query tokens per row; ignored at level 0.

    Raises:
      ValueError: a negative level, after level 0 a `query_len` below 1 or above the number of draft
        tokens of the tree, a `bias` that is not square, or a batch without rows.
    """
    check_batch("tree.build_for_drafting", batch)
    _check_square(bias)
    if draft_index < 0:
        raise ValueError(f"draft_index must be >= 0, got {draft_index}")
    if draft_index and not 1 <= query_len < bias.shape[0]:
        raise ValueError(
            f"query_len must be in [1, {bias.shape[0] - 1}], the draft tokens of the tree, "
            f"got {query_len}"
        )
    drafts = slice(1, 1 + query_len) if draft_index else slice(0)
    return build(batch, bias[drafts, drafts])


def _check_square(bias: Array) -> None:
    if bias.ndim != 2 or bias.shape[0] != bias.shape[1]:
        raise ValueError(f"bias must be [L, L], see tree_attn_bias, got {[*bias.shape]}")
