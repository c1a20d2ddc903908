"""metadata.tree against slow Python on random batches, and attention through it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import tree
from jaxkv.metadata.common import BatchMetadata, num_computed_tokens
from tests.util.batches import FEW, ONE, SOME, Case, assert_same, cases, every_batch

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


@pytest.mark.parametrize("flags", [np.ones(3, bool), np.ones(4, np.int32)])
def test_invalid_flags_raise(flags):
    batch = Case([1], [1], [[1]], FEW._replace(max_num_reqs=4)).batch()
    with pytest.raises(ValueError, match="is_prefilling must be "):
        tree.build(batch, tree.tree_attn_bias(CHAIN), is_prefilling=flags)


@functools.cache
def compiled_with_flags(choices: tuple[tuple[int, ...], ...]):
    bias = tree.tree_attn_bias(choices)
    return jax.jit(lambda batch, flags: tree.build(batch, bias, is_prefilling=flags))


@every_batch
@given(cases(bounds=(ONE, FEW, SOME)), st.integers(0, 2**32 - 1))
def test_short_prompts_are_prefills(case: Case, seed: int):
    prefilling = np.random.default_rng(seed).random(case.num_reqs) < 0.3
    flags = np.zeros(case.bounds.max_num_reqs, bool)
    flags[: case.num_reqs] = prefilling
    metadata = compiled_with_flags(tuple(CHAIN))(case.batch(), flags)
    long = [r for r, q in enumerate(case.query_lens) if q > 4 or prefilling[r]]
    num_decodes = min(long, default=case.num_reqs)
    assert_part(metadata.decode, case, range(num_decodes))
    assert_part(metadata.prefill, case, range(num_decodes, case.num_reqs))


@jax.jit
def attend(part, bias, q, keys, values):
    """Attention of the rows of a part over pages: q is [R, L, D], pages [N, size, D].

    A token sees those up to itself, as in a kernel; the bias, if any, applies from the row's first
    query token on.
    """
    num_rows, length, _ = q.shape
    context = part.max_blocks * part.block_size
    keys, values = (x[part.block_table].reshape(num_rows, context, -1) for x in (keys, values))
    column = jnp.arange(context) - num_computed_tokens(part)[:, None]
    einsum = functools.partial(jnp.einsum, precision="highest")  # GPUs would round to TF32
    scores = einsum("rld,rkd->rlk", q, keys)
    if bias is not None:
        inside = (column >= 0) & (column < length)
        of_drafts = bias[:, jnp.clip(column, 0, length - 1)].transpose(1, 0, 2)
        scores += jnp.where(inside[:, None], of_drafts, 0)
    seen = column[:, None] <= jnp.arange(length)[:, None]
    return einsum("rlk,rkd->rld", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), values)


SIBLINGS = [(0,), (1,), (2,)]


@pytest.mark.parametrize("choices", [CHOICES, CHAIN, SIBLINGS], ids=["tree", "chain", "siblings"])
def test_attention_sees_one_branch(choices):
    """Of decodes with all draft tokens, the first ones or none; a prompt sees all of itself."""
    rng = np.random.default_rng(0)
    nodes, size, blocks = [(), *choices], 4, 6
    length = len(nodes)
    query_lens = [length, length, length, 1, 1, length - 1, 2, 3, 2]
    seq_lens = [length, length + 5, blocks * size, 1, 11, blocks * size, 9, 3, 8]
    prompts = np.arange(len(seq_lens)) >= 7
    tables = rng.permutation(np.arange(1, 1 + len(seq_lens) * blocks)).reshape(-1, blocks)
    batch = BatchMetadata.from_host(
        query_lens,
        seq_lens,
        tables,
        max_num_reqs=len(seq_lens),
        max_num_tokens=sum(query_lens),
        max_blocks=blocks,
        block_size=size,
    )
    q = rng.normal(size=(len(seq_lens), length, 8)).astype(np.float32)
    keys, values = rng.normal(size=(2, 1 + tables.size, size, 8)).astype(np.float32)
    metadata = tree.build(batch, tree.tree_attn_bias(choices), is_prefilling=prompts)
    of_decodes = attend(metadata.decode, metadata.tree_attn_bias, q, keys, values)
    of_prompts = attend(metadata.prefill, None, np.roll(q, -7, axis=0), keys, values)
    got = np.concatenate([of_decodes[:7], of_prompts[:2]])
    for r, (query, context) in enumerate(zip(query_lens, seq_lens, strict=True)):
        k, v = (x[tables[r]].reshape(-1, 8) for x in (keys, values))
        computed = context - query
        for i, node in enumerate(nodes[:query]):
            # The context of a decode of this branch alone.
            branch = [nodes.index(node[:n]) for n in range(len(node) + 1)]
            seen = [*range(computed)] + [
                computed + n for n in (range(i + 1) if prompts[r] else branch)
            ]
            weights = np.exp(k[seen] @ q[r, i])
            want = weights / weights.sum() @ v[seen]
            np.testing.assert_allclose(got[r, i], want, rtol=1e-4, atol=1e-5)
