"""Attention of the serving example, compared with dense attention in NumPy."""

import itertools
import sys
import types
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.serving import attention
from examples.serving.attention import KEY_BLOCK, attend, loops, num_splits, select
from jaxkv.metadata import BatchMetadata

pytestmark = pytest.mark.end_to_end


@pytest.fixture(autouse=True)
def full_float32_products():
    """No TF32, whose rounding is of the order of the margin between the two best tokens."""
    with jax.default_matmul_precision("highest"):
        yield


def attention_case(query_lens, seq_lens, page_size, heads, kv_heads, head_dim, dtype, max_tokens):
    rng = np.random.default_rng(sum(seq_lens))
    max_blocks = -(-max(seq_lens) // page_size) + 1
    ids = iter(1 + rng.permutation(len(seq_lens) * max_blocks))
    table = [list(itertools.islice(ids, -(-length // page_size))) for length in seq_lens]
    rows = BatchMetadata.from_host(
        query_lens, seq_lens, table, max_num_reqs=len(seq_lens) + 1, max_num_tokens=max_tokens,
        max_blocks=max_blocks, block_size=page_size,
    )  # fmt: skip
    pages = (len(seq_lens) * max_blocks + 1, page_size, kv_heads, head_dim)
    k, v, q = (
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        for shape in (pages, pages, (max_tokens, heads, head_dim))
    )
    return q, k, v, rows, table


def dense_attention(q, k, v, query_lens, seq_lens, table):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, start = [], 0
    group = q.shape[1] // k.shape[2]
    for count, length, pages in zip(query_lens, seq_lens, table, strict=True):
        keys = np.repeat(k[pages].reshape(-1, *k.shape[2:])[:length], group, axis=1)
        values = np.repeat(v[pages].reshape(-1, *v.shape[2:])[:length], group, axis=1)
        for i in range(count):
            seen = length - count + i + 1
            scores = np.einsum("hd,khd->hk", q[start + i], keys[:seen]) / q.shape[2] ** 0.5
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out.append(np.einsum("hk,khd->hd", weights, values[:seen]))
        start += count
    return np.array(out)


BATCHES = [
    ([1, 130, 300], [700, 130, 301], 440),
    ([1, 1, 1], [5, 200, 64], 4),
    ([1, 40, 3, 17], [90, 40, 33, 150], 80),
    ([0, 16, 1], [0, 16, 1], 20),
    ([33], [300], 64),
    ([1] * 16, [900, 64, 320, *range(1, 14)], 17),
]


@pytest.mark.parametrize(("query_lens", "seq_lens", "max_tokens"), BATCHES)
@pytest.mark.parametrize("page_size", [4, 16, 128])
@pytest.mark.parametrize("key_block", [64, 256, 1024])
def test_xla_attention(query_lens, seq_lens, max_tokens, page_size, key_block, monkeypatch):
    monkeypatch.setitem(KEY_BLOCK, jax.default_backend(), key_block)
    q, k, v, rows, table = attention_case(
        query_lens, seq_lens, page_size, 6, 2, 8, jnp.float32, max_tokens
    )
    out = np.asarray(jax.jit(attend, static_argnums=0)("xla", q, k, v, rows))
    wanted = dense_attention(q, k, v, query_lens, seq_lens, table)
    np.testing.assert_allclose(out[: len(wanted)], wanted, atol=2e-5)


@hypothesis.given(st.lists(st.integers(0, 100), min_size=1, max_size=70))
def test_tiles_visit_their_own_blocks(lengths):
    blocks: Any = np.sort(lengths)[::-1]
    visited = np.zeros((len(blocks), 101), int)
    for n, start, end in loops(blocks):
        visited[:n, start:end] += 1
    wanted = np.arange(101) < blocks[:, None]
    assert (visited[wanted] == 1).all()
    assert (visited <= 1).all()
    assert visited.sum() <= 4 * blocks.sum()


def kernel_on_cpu(q, k_cache, v_cache, *, cache_seqlens, page_table, is_causal, num_splits):
    """What `flash_mha_with_kvcache` computes, with NaN for queries that see no key."""
    assert is_causal and num_splits >= 1

    def of_row(q, length, pages):
        k, v = (x[pages].reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache))
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        seen = jnp.arange(len(k)) <= length - len(q) + jnp.arange(len(q))[:, None]
        scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    return jax.vmap(of_row)(q, cache_seqlens, page_table)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("query_lens", "seq_lens", "max_tokens"), BATCHES)
@pytest.mark.parametrize("page_size", [16, 128])
def test_operands_of_flash_attention(query_lens, seq_lens, max_tokens, page_size, monkeypatch):
    def decode(q, k, v, rows, metadata, splits):
        assert metadata.shape == (4 * -(-len(q) // 4) * 4 + 1,)
        cache = {"cache_seqlens": rows.seq_lens, "page_table": rows.block_table}
        return kernel_on_cpu(q[:, None], k, v, **cache, is_causal=True, num_splits=splits)[:, 0]

    package = types.SimpleNamespace(flash_mha_with_kvcache=kernel_on_cpu)
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", package)
    monkeypatch.setattr(attention, "_decode_flash", decode)
    q, k, v, rows, table = attention_case(
        query_lens, seq_lens, page_size, 4, 2, 8, jnp.float32, max_tokens
    )
    out = np.asarray(jax.jit(attend, static_argnums=0)("flash", q, k, v, rows))
    wanted = dense_attention(q, k, v, query_lens, seq_lens, table)
    np.testing.assert_allclose(out[: len(wanted)], wanted, atol=2e-5)


def require_flash():
    try:
        select("flash", np.dtype(jnp.bfloat16), 128)
    except NotImplementedError as reason:
        pytest.skip(str(reason))


def relative_error(out, wanted):
    out = np.asarray(out, np.float64)[: len(wanted)]
    return np.linalg.norm(out - wanted) / np.linalg.norm(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("query_lens", "seq_lens", "max_tokens"), BATCHES)
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_flash_attention(query_lens, seq_lens, max_tokens, page_size):
    require_flash()
    q, k, v, rows, table = attention_case(
        query_lens, seq_lens, page_size, 32, 8, 128, jnp.bfloat16, max_tokens
    )
    out = jax.jit(attend, static_argnums=0)("flash", q, k, v, rows)
    wanted = dense_attention(q, k, v, query_lens, seq_lens, table)
    assert relative_error(out, wanted) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "splits"), [([5, 200, 64], 1), ([1500, 40, 2048], 4)])
def test_decodes_of_all_layers_in_a_cuda_graph(lengths, splits):
    """The operands of later runs are elsewhere, so XLA has to update the graph."""
    require_flash()
    q, k, v, rows, table = attention_case([1] * 3, lengths, 64, 32, 8, 128, jnp.bfloat16, 4)
    assert num_splits(len(q), 8, rows.max_blocks * rows.block_size) == splits
    step = jax.jit(lambda layers, k, v, rows: [attend("flash", q, k, v, rows) for q in layers])
    kept = []
    for run in range(4):
        layers = [jnp.roll(q, 8 * run + layer, axis=1) for layer in range(6)]
        operands = layers, jnp.array(k), jnp.array(v), rows
        kept.append((operands, step(*operands)))
    for (layers, *_), out in kept:
        for q, found in zip(layers, out, strict=True):
            wanted = dense_attention(q, k, v, [1] * 3, lengths, table)
            assert relative_error(found, wanted) < 1e-2


def test_splits_use_all_multiprocessors():
    assert num_splits(1, 8, 32_768) == 16
    assert num_splits(8, 8, 8192) == 2
    assert num_splits(64, 8, 4096) == num_splits(1, 8, 64) == 1


@pytest.mark.cpu_only
def test_flash_is_rejected_with_the_reason():
    with pytest.raises(NotImplementedError, match=r"needs a GPU of compute capability 9.0, got"):
        select("flash", np.dtype(jnp.bfloat16), 128)
    with pytest.raises(ValueError, match="one of"):
        select("fastest", np.dtype(jnp.bfloat16), 128)
    assert select(None, np.dtype(np.float32), 64) == "xla"
