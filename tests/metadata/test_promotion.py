"""Programs may forbid implicit promotion of dtypes and ranks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import metadata, recurrent
from tests.metadata.test_builders import BUILDERS, CASES, OF_INT64
from tests.util.batches import FEW, num_blocks_of

ONES = np.ones(FEW.max_num_reqs, np.int32)
TEMPORAL = recurrent.StateKind.TEMPORAL


def flex(batch: metadata.BatchMetadata) -> Any:
    """Update and masks of flex."""
    ranges, blocks = np.array([[[0, 1]]] * FEW.max_num_reqs, np.int32), num_blocks_of(FEW)
    built = metadata.flex.build(batch, num_blocks=blocks, mm_prefix_range=ranges, updatable=True)
    token, slot = (
        jnp.arange(n, dtype=jnp.int32) for n in (batch.max_num_tokens, blocks * batch.block_size)
    )
    mask = metadata.flex.encoder_mask(built.doc_ids, token[:, None], token[None], sliding_window=4)
    built = metadata.flex.update(built, batch, mm_prefix_range=ranges)
    return built, mask, built.mask(token[:, None], slot[None])


OTHERS: dict[str, Callable[[metadata.BatchMetadata], Any]] = {
    "flex, update": flex,
    "flashinfer, max_pages": lambda batch: metadata.flashinfer.build(batch, max_pages=12),
    "distinct blocks": lambda batch: metadata.unique_first_occurrence(
        jnp.asarray(batch.block_table), num_blocks_of(FEW)
    ),
    "local_attention, gather": lambda batch: metadata.local_attention.build(batch, 8).gather(
        batch.block_table
    ),
    "advance": lambda batch: recurrent.advance(
        batch, ONES, num_drafts=0 * ONES, next_query_lens=ONES
    ),
    "align_preprocess": lambda batch: recurrent.align_preprocess(
        jnp.zeros((num_blocks_of(FEW), 8)), batch, ONES, kinds=TEMPORAL, state_idx=-ONES
    ),
    "align_postprocess": lambda batch: recurrent.align_postprocess(
        jnp.zeros((num_blocks_of(FEW), 8)), batch, ONES, kinds=TEMPORAL, num_drafts=0 * ONES
    ),
    "deferred counts": lambda batch: recurrent.DeferredCounts.start(
        ONES, step=3, request_ids=batch.seq_lens
    ),
}
NAMED = {f"of int64: {name}": build for name, build in OF_INT64.items()} | BUILDERS | OTHERS


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("name", NAMED)
def test_no_implicit_promotion(name, x64):
    """Of arguments, and of NumPy arrays that a traced function closes over."""
    batch, build = CASES[0].batch(), NAMED[name]
    with jax.enable_x64(x64):
        want = jax.tree.leaves(jax.eval_shape(build, batch))
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            for got in (jax.eval_shape(build, batch), jax.eval_shape(lambda: build(batch))):
                assert jax.tree.leaves(got) == want
