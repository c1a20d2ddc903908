"""metadata.tree against slow Python on random batches, and attention through it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import tree
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import Case, assert_same, cases, every_batch

CHOICES = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]
CHAIN = [(0,), (0, 0), (0, 0, 0)]


@st.composite
def trees(draw) -> list[tuple[int, ...]]:
    """Choices in which the parent of each node precedes it."""
    nodes: list[tuple[int, ...]] = [()]
    children: dict[tuple[int, ...], int] = {}
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(nodes))
        children[parent] = children.get(parent, 0) + 1
        nodes.append((*parent, children[parent] - 1))
    return nodes[1:]


@given(trees())
def test_bias(choices):
    nodes = [(), *choices]
    want = [[0 if a[: len(b)] == b else -np.inf for b in nodes] for a in nodes]
    np.testing.assert_array_equal(
        tree.tree_attn_bias(choices), np.array(want, np.float32), strict=True
    )


def test_bias_examples():
    see = tree.tree_attn_bias([(0,), (1,), (0, 0)]) == 0
    assert see.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


@pytest.mark.parametrize("choices", [[(0,), (0,)], [(0, 0), (0,)], [(0,), (1, 0)], [()]])
def test_invalid_tree_raises(choices):
    with pytest.raises(ValueError, match="must be unique and preceded by its parent"):
        tree.tree_attn_bias(choices)


@functools.cache
def compiled(num_choices: int, draft_index: int | None = None):
    bias = tree.tree_attn_bias(CHOICES[:num_choices])
    if draft_index is None:
        return jax.jit(lambda batch: tree.build(batch, bias))
    return jax.jit(
        lambda batch: tree.build_for_drafting(batch, bias, draft_index=draft_index, query_len=2)
    )


def assert_part(got: BatchMetadata, case: Case, rows: range) -> None:
    """`got` equals the batch that a scheduler would have made of these rows."""
    part = case.reordered(rows).batch()
    for name in ("query_start_loc", "seq_lens", "block_table", "num_reqs", "num_tokens"):
        want = getattr(part, name)
        np.testing.assert_array_equal(getattr(got, name), want, err_msg=name, strict=True)
    assert (got.max_num_tokens, got.block_size) == (part.max_num_tokens, part.block_size)


@every_batch
@given(cases(), st.sampled_from([(0, None), (3, None), (6, 0), (6, 1)]), st.booleans())
def test_build(case: Case, step: tuple[int, int | None], ordered: bool):
    num_choices, draft_index = step
    threshold = num_choices + 1 if draft_index is None else [0, 2][draft_index]
    if ordered:
        case = case.decodes_first(threshold)
    metadata = compiled(num_choices, draft_index)(case.batch())
    long = [r for r, q in enumerate(case.query_lens) if q > threshold]
    num_decodes = min(long, default=case.num_reqs)
    assert_part(metadata.decode, case, range(num_decodes))
    assert_part(metadata.prefill, case, range(num_decodes, case.num_reqs))
    for part, rows in (("decode", slice(num_decodes)), ("prefill", slice(num_decodes, None))):
        longest = getattr(metadata, f"{part}_max_query_len")
        assert_same(longest, max(case.query_lens[rows], default=0))
        longest = getattr(metadata, f"{part}_max_seq_len")
        assert_same(longest, max(case.seq_lens[rows], default=0))
    bias = tree.tree_attn_bias(CHOICES[:num_choices])
    if draft_index is not None:
        bias = bias[1 : 1 + threshold, 1 : 1 + threshold]
    np.testing.assert_array_equal(metadata.tree_attn_bias, bias, strict=True)


@pytest.mark.parametrize("draft_index, query_len", [(-1, 1), (1, 0), (2, 4)])
def test_invalid_levels_raise(draft_index, query_len):
    batch = BatchMetadata.from_host(
        [1], [1], [[1]], max_num_reqs=1, max_num_tokens=4, max_blocks=1, block_size=4
    )
    with pytest.raises(ValueError, match=r"draft_index must be|query_len must be"):
        tree.build_for_drafting(
            batch, tree.tree_attn_bias(CHAIN), draft_index=draft_index, query_len=query_len
        )


@pytest.mark.parametrize("shape", [(3,), (3, 2), ()])
def test_bias_that_is_not_square_raises(shape):
    batch = BatchMetadata.from_host(
        [1], [1], [[1]], max_num_reqs=1, max_num_tokens=4, max_blocks=1, block_size=4
    )
    bias = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"bias must be \[L, L\], see tree_attn_bias, got \["):
        tree.build(batch, bias)
    with pytest.raises(ValueError, match=r"bias must be \[L, L\]"):
        tree.build_for_drafting(batch, bias, draft_index=1, query_len=1)


@jax.jit
def attend(metadata: tree.TreeMetadata, q, keys, values):
    """Attention of the decodes, L tokens each, over pages; q is [R, L, D], pages [N, size, D]."""
    decode, (num_rows, length, _) = metadata.decode, q.shape
    context = decode.max_blocks * decode.block_size
    keys, values = (x[decode.block_table].reshape(num_rows, context, -1) for x in (keys, values))
    position = jnp.arange(context)
    column = position - (decode.seq_lens - length)[:, None]
    bias = metadata.tree_attn_bias[:, jnp.clip(column, 0, length - 1)].transpose(1, 0, 2)
    bias = jnp.where((column < 0)[:, None], 0, bias)
    einsum = functools.partial(jnp.einsum, precision="highest")  # GPUs would round to TF32
    scores = einsum("rld,rkd->rlk", q, keys) + bias
    scores = jnp.where((column < length)[:, None], scores, -jnp.inf)
    return einsum("rlk,rkd->rld", jax.nn.softmax(scores), values)


@pytest.mark.parametrize("choices", [CHOICES, CHAIN], ids=["tree", "chain"])
def test_attention_sees_one_branch(choices):
    rng = np.random.default_rng(0)
    nodes, size, blocks = [(), *choices], 4, 6
    length = len(nodes)
    seq_lens = [length, length + 5, blocks * size]
    tables = rng.permutation(np.arange(1, 1 + len(seq_lens) * blocks)).reshape(-1, blocks)
    batch = BatchMetadata.from_host(
        [length] * len(seq_lens),
        seq_lens,
        tables,
        max_num_reqs=len(seq_lens),
        max_num_tokens=length * len(seq_lens),
        max_blocks=blocks,
        block_size=size,
    )
    q = rng.normal(size=(len(seq_lens), length, 8)).astype(np.float32)
    keys, values = rng.normal(size=(2, 1 + tables.size, size, 8)).astype(np.float32)
    got = attend(tree.build(batch, tree.tree_attn_bias(choices)), q, keys, values)
    for r, context in enumerate(seq_lens):
        k, v = (x[tables[r]].reshape(-1, 8) for x in (keys, values))
        for i, node in enumerate(nodes):
            # The context of a decode of this branch alone.
            branch = [context - length + nodes.index(node[:n]) for n in range(len(node) + 1)]
            seen = [*range(context - length), *branch]
            weights = np.exp(k[seen] @ q[r, i])
            want = weights / weights.sum() @ v[seen]
            np.testing.assert_allclose(got[r, i], want, rtol=1e-4, atol=1e-5)
