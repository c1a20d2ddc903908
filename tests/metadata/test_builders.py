"""Properties of every builder: one executable for all batches, and no host round trip."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import metadata
from tests.util.batches import FEW, Case, num_blocks_of

CASES = [
    Case([1, 1, 7, 0, 3], [9, 1, 12, 4, 3], [[5, 2, 9], [1], [3, 4, 8], [6], [7]], FEW),
    Case([1], [24], [[1, 2, 3, 4, 5, 6]], FEW),
    Case([], [], [], FEW),
    Case([4] * 5, [8] * 5, [[2 * i + 1, 2 * i + 2] for i in range(5)], FEW),
]

BUILDERS: dict[str, Callable[[metadata.BatchMetadata], Any]] = {
    "slot_mapping": lambda batch: metadata.slot_mapping(batch, metadata.token_positions(batch)),
    "split": metadata.split_decodes_and_prefills,
    "split, extends": metadata.split_decodes_prefills_and_extends,
    "sections": lambda batch: metadata.sections(
        batch, metadata.split_decodes_prefills_and_extends(batch)
    ),
    "reorder": lambda batch: metadata.reorder_batch_on_device(batch, batch.seq_lens),
    "flashinfer": metadata.flashinfer.build,
    "flashinfer dense": metadata.flashinfer.build_dense,
    "flash_attention": partial(
        metadata.flash_attention.build,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        block_m=64,
        block_n=64,
        num_splits=4,
        num_sms=132,
    ),
    "ragged_paged": metadata.ragged_paged.build,
    "triton": partial(metadata.triton.build, num_q_heads=8, num_kv_heads=2, head_dim=64),
    "turboquant": metadata.turboquant.build,
    "flex": partial(metadata.flex.build, num_blocks=num_blocks_of(FEW), sliding_window=7),
    "mamba": lambda batch: metadata.mamba.build(batch, is_prefilling=batch.query_lens > 1),
    "mamba2, align": lambda batch: metadata.mamba.build(
        batch, is_prefilling=batch.query_lens > 2, mode="align", chunk_size=4, num_spec_tokens=1
    ),
    "mamba2, all": lambda batch: metadata.mamba.build(
        batch, is_prefilling=batch.query_lens > 1, mode="all", chunk_size=4
    ),
    "gdn": lambda batch: metadata.gdn.build(
        batch,
        num_draft_tokens=jnp.minimum(batch.query_lens - 1, 2),
        num_accepted_tokens=batch.query_lens,
        num_spec_tokens=2,
    ),
    "linear attention": metadata.gdn.build_linear,
    "tree": partial(metadata.tree.build, bias=metadata.tree.tree_attn_bias([(0,), (0, 0)])),
    "local_attention": partial(metadata.local_attention.build, chunk_size=8),
    "cascade": partial(metadata.cascade.build, num_common_blocks=1),
    "kv_sharing": lambda batch: metadata.kv_sharing.build(
        batch, metadata.logits_indices(batch), batch.num_reqs
    ),
    "prefix_lm": lambda batch: metadata.prefix_lm.build(
        batch, jnp.zeros((batch.max_num_reqs, 2, 2), jnp.int32)
    ),
}
LONG: Any = np.int64
# Sizes and arrays as NumPy has them by default.
OF_INT64: dict[str, Callable[[metadata.BatchMetadata], Any]] = {
    "slot_mapping": lambda batch: metadata.slot_mapping(
        batch, np.arange(24), cp_world_size=LONG(2), cp_rank=LONG(1), cp_interleave=LONG(2)
    ),
    "slot_mapping of a rank on the device": lambda batch: metadata.slot_mapping(
        batch, np.arange(24), cp_world_size=2, cp_rank=jnp.asarray(LONG(1)), cp_interleave=2
    ),
    "local lengths": lambda batch: metadata.dcp_local_seq_lens(
        jnp.asarray(batch.seq_lens), LONG(2), LONG(1), LONG(2)
    ),
    "local lengths of all ranks": lambda batch: metadata.dcp_local_seq_lens(
        jnp.asarray(batch.seq_lens), LONG(2), None, LONG(2)
    ),
    "flashinfer": partial(metadata.flashinfer.build, max_pages=LONG(20)),
    "flashinfer, ranks": partial(
        metadata.flashinfer.build,
        max_pages=LONG(20),
        dcp_world_size=LONG(2),
        dcp_rank=LONG(1),
        dcp_interleave=LONG(2),
    ),
    "ragged_paged": partial(metadata.ragged_paged.build, pages="packed", max_pages=LONG(20)),
    "flash_attention": partial(
        metadata.flash_attention.build,
        num_q_heads=LONG(8),
        num_kv_heads=LONG(2),
        head_dim=LONG(64),
        block_m=LONG(64),
        block_n=LONG(64),
        num_splits=LONG(4),
        num_sms=LONG(132),
    ),
    "triton": lambda batch: metadata.triton.build(
        batch,
        num_q_heads=LONG(8),
        num_kv_heads=LONG(2),
        head_dim=LONG(64),
        mm_prefix_range=np.zeros((5, 2, 2), LONG),
    ),
    "flex": lambda batch: metadata.flex.build(
        batch, num_blocks=LONG(64), mm_prefix_range=np.zeros((5, 2, 2), LONG)
    ),
    "mamba2": lambda batch: metadata.mamba.build(
        batch,
        is_prefilling=np.ones(5, bool),
        chunk_size=LONG(4),
        num_spec_tokens=LONG(1),
        num_accepted_tokens=np.ones(5, LONG),
    ),
    "local_attention": lambda batch: metadata.local_attention.build(batch, LONG(8)),
    "kv_sharing": lambda batch: metadata.kv_sharing.build(batch, np.arange(5), LONG(5)),
    "prefix_lm": lambda batch: metadata.prefix_lm.build(batch, np.zeros((5, 2, 2), LONG)),
}
every_builder = pytest.mark.parametrize("name", BUILDERS)

# Permitted calls: those of jaxkv on the device, and the sort and scan libraries that XLA calls on
# its own.
ALLOWED_CALLS = re.compile(r"jaxkv_(check_bounds|flashinfer)|__cub\$\w+|__cublas\$\w+")


@every_builder
def test_all_batches_share_one_executable(name):
    traced = []

    @jax.jit
    def build(batch):
        traced.append(batch)
        return BUILDERS[name](batch)

    for case in CASES:
        jax.block_until_ready(build(case.batch()))
    assert len(traced) == 1


@pytest.mark.parametrize("name", OF_INT64)
def test_int64_does_not_spread_to_results(name):
    with jax.enable_x64(True):
        leaves = jax.tree.leaves(OF_INT64[name](CASES[0].batch()))
    assert np.dtype(np.int64) not in {leaf.dtype for leaf in leaves}


@every_builder
def test_batch_in_closure(name):
    batch, build = CASES[0].batch(), BUILDERS[name]
    want, got = jax.jit(build)(batch), jax.jit(lambda: build(batch))()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_ranges_in_closure():
    batch, ranges = CASES[0].batch(), np.array([[[0, 1]]] * FEW.max_num_reqs, np.int32)

    @jax.jit
    def build():
        flex = metadata.flex.build(batch, num_blocks=num_blocks_of(FEW), mm_prefix_range=ranges)
        tokens = jnp.arange(batch.max_num_tokens)
        local = metadata.local_attention.build(batch, 8).gather(batch.block_table)
        return metadata.prefix_lm.build(batch, ranges), flex.mask(tokens, tokens), local

    assert [x.shape[0] for x in build()][:2] == [batch.max_num_tokens] * 2


DOCUMENTED = [
    (module, name)
    for module, members in vars(metadata).items()
    if hasattr(members, "build")
    for name in ("build", "build_dense", "build_linear")
    if hasattr(members, name)
]


@pytest.mark.parametrize(("module", "name"), DOCUMENTED)
def test_examples_of_docstrings_run(module, name):
    sizes = {"max_num_reqs": 4, "max_num_tokens": 16, "max_blocks": 4, "block_size": 4}
    table = [[1, 2, 3], [4, 5, 6]]
    names = {
        "batch": metadata.BatchMetadata.from_host([3, 2], [10, 12], table, **sizes),
        "drafts": np.array([2, 1, -1, -1]),
        "accepted": np.ones(4, np.int32),
        "np": np,
    }
    docstring = getattr(getattr(metadata, module), name).__doc__
    example = re.search(r"Example: `(.+?)`", " ".join(docstring.split()))
    assert example
    jax.block_until_ready(eval(example[1], vars(metadata) | names))


def optimised(build: Callable[[metadata.BatchMetadata], Any]) -> str:
    """The optimized HLO."""
    return jax.jit(build).lower(CASES[0].batch()).compile().as_text() or ""


@every_builder
def test_builders_have_no_host_round_trip(name):
    text = optimised(BUILDERS[name])
    assert not re.search(r"\b(infeed|outfeed|send|recv|copy-start)\(|callback|S\(5\)", text)
    called = re.findall(r'custom_call_target="([^"]+)"', text)
    assert all(ALLOWED_CALLS.fullmatch(target) for target in called), called


@pytest.mark.gpu
@every_builder
def test_builders_have_no_transfers(name):
    batch = jax.device_put(CASES[0].batch())
    with jax.transfer_guard("disallow_explicit"):
        built = jax.jit(BUILDERS[name])(batch)
    on_cpu = [np.asarray(leaf) for leaf in jax.tree.leaves(built)]
    assert on_cpu


def test_negative_control_callback_is_detected():
    """Negative control of `test_builders_have_no_host_round_trip`."""

    def build(batch):
        lens = jax.ShapeDtypeStruct(batch.seq_lens.shape, batch.seq_lens.dtype)
        return jax.pure_callback(lambda x: x, lens, batch.seq_lens)

    assert "callback" in optimised(build)


@every_builder
def test_batch_without_rows_is_rejected(name):
    """Rows of padding are indexed too."""
    shapes = {"query_start_loc": (1,), "seq_lens": (0,), "block_table": (0, 3)}
    arrays: dict[str, Any] = {field: np.zeros(shape, np.int32) for field, shape in shapes.items()}
    arrays |= {"num_reqs": np.int32(0), "num_tokens": np.int32(0)}
    batch = metadata.BatchMetadata(**arrays, max_num_tokens=8, block_size=4)
    message = "logits_indices" if name == "kv_sharing" else "seq_lens has 0 rows"
    for build in (BUILDERS[name], jax.jit(BUILDERS[name])):
        with pytest.raises(ValueError, match=message):
            build(batch)
