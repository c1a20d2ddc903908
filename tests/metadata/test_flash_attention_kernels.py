"""`flash_attention.build` against FlashAttention-3's prepare kernel, and read by its attention.

In addition to a GPU of compute capability 9.0 this needs `pip install '.[flash]'`.
"""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.serving.attention import _decode_flash
from jaxkv.metadata import BatchMetadata, flash_attention
from tests.util.batches import Bounds, Case, cases

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCK_M = 128
LONG = Bounds(8, 512, 48, 64)  # contexts of up to 24 tiles: some are split
MANY = Bounds(96, 768, 16, 64)  # more rows than one warp of the prepare kernel takes
FLOAT16 = 10  # in XLA's enumeration of element types


@pytest.fixture(scope="module")
def package() -> None:
    """Registers the FFI targets."""
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")
    pytest.importorskip("flash_attn3_jax")


def options(*, paged: bool, causal: bool, local: bool, splits: int) -> dict[str, Any]:
    """Arguments of `flash_attention.build` for a kernel of the package."""
    return {
        "num_q_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "block_m": BLOCK_M,
        "block_n": 128 if paged or causal or local else 176,
        "num_splits": splits,
        "num_sms": jax.devices()[0].core_count,
        "causal": causal,
        "local": local,
    }


def prepared(batch: BatchMetadata, *, paged: bool, causal: bool, local: bool, splits: int) -> Any:
    """The metadata by the prepare kernel."""
    none = jnp.zeros(0, jnp.int32)
    rows = -(-batch.max_num_reqs // 4) * 4
    vectors = 2 + (not local) + (causal or local)
    window = 100 if local else -1
    return jax.ffi.ffi_call(
        "flash_mha_fwd_get_scheduler_metadata",
        jax.ShapeDtypeStruct((rows * vectors + 1,), jnp.int32),
    )(
        batch.seq_lens, batch.query_start_loc, none, none, none, none,
        batch_size=batch.max_num_reqs, max_seqlen_q=batch.max_num_tokens,
        max_seqlen_k=batch.max_blocks * batch.block_size, num_heads=HEADS, num_heads_k=KV_HEADS,
        headdim=HEAD_DIM, headdim_v=HEAD_DIM, qkv_dtype_int=np.int32(FLOAT16),
        page_size_val=batch.block_size if paged else 0, page_size_has_value=paged,
        max_seqlen_k_new=0, is_causal=causal, window_size_left=window, window_size_right=window,
        attention_chunk=0, has_softcap=False, num_splits=splits, pack_gqa_val=True,
        pack_gqa_has_value=True, sm_margin=0,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("paged", "causal", "local", "splits"))
def both(batch: BatchMetadata, **static: Any) -> tuple[Any, Any]:
    return prepared(batch, **static), flash_attention.build(batch, **options(**static)).packed


@hypothesis.settings(max_examples=60)
@given(
    cases(bounds=(LONG, MANY), min_reqs=1),
    st.booleans(),
    st.sampled_from(((True, False), (False, False), (False, True))),
    st.sampled_from((1, 4, 32)),
)
def test_equals_the_prepare_kernel(package, case: Case, paged, kind, splits):
    hypothesis.assume(case.num_tokens and all(case.seq_lens))
    causal, local = kind
    want, got = both(case.batch(), paged=paged, causal=causal, local=local, splits=splits)
    rows = case.bounds.max_num_reqs
    for name, packed in ("prepare kernel", want), ("jaxkv", got):
        assert packed[-1] == 0, name
    # The prepare kernel leaves the padding of a vector as it was.
    want, got = (np.asarray(x)[:-1].reshape(-1, -(-rows // 4) * 4)[:, :rows] for x in (want, got))
    np.testing.assert_array_equal(got, want)


# With metadata of no elements the kernel prepares its own.
decode = jax.jit(_decode_flash, static_argnames="splits")


@pytest.mark.parametrize("splits", [1, 16])
@pytest.mark.parametrize("bounds", [LONG, MANY])
def test_attention_is_that_with_metadata_of_its_own(package, bounds: Bounds, splits: int):
    """Bit for bit, also in a second call with the same metadata."""
    rng = np.random.default_rng(splits)
    rows, size = bounds.max_num_reqs, bounds.block_size
    seq_lens = rng.integers(1, bounds.max_blocks * size + 1, rows)
    tables = 1 + rng.permutation(rows * bounds.max_blocks).reshape(rows, -1)
    case = Case([1] * rows, seq_lens.tolist(), tables.tolist(), bounds)
    batch = jax.device_put(case.batch())
    keys = jax.random.split(jax.random.key(splits), 3)
    shape = (case.num_blocks, size, KV_HEADS, HEAD_DIM)
    k, v = (jax.random.normal(key, shape, jnp.float16) for key in keys[:2])
    q = jax.random.normal(keys[2], (rows, HEADS, HEAD_DIM), jnp.float16)
    metadata = flash_attention.build(
        batch, **options(paged=True, causal=True, local=False, splits=splits)
    )
    assert (int(metadata.num_splits_dynamic.max()) > 1) == (splits > 1 and bounds is LONG)
    want = np.asarray(decode(q, k, v, batch, jnp.zeros(0, jnp.int32), splits=splits))
    assert np.isfinite(want).all()
    packed = jnp.copy(metadata.packed)
    for _ in range(2):  # the package's handler resets the semaphore after a call
        got = decode(q, k, v, batch, packed, splits=splits)
        np.testing.assert_array_equal(np.asarray(got), want)
    assert packed[-1] == 0
