"""FlashInfer's own kernels, with metadata of `flashinfer.build`, agree with dense attention.

In addition to a GPU this needs `pip install flashinfer-python jax-tvm-ffi` (passed with 0.7.2.post1
and 0.1.3) and, for the first run, nvcc: FlashInfer then compiles the kernels, and caches them.
"""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxkv.metadata import flashinfer
from tests.util.attention_reference import NUM_KV_HEADS, NUM_Q_HEADS, Problem, written
from tests.util.batches import Bounds, Case, cases

pytestmark = pytest.mark.gpu

# Contexts long enough that both kernels split some of them and merge the parts.
LONG = Bounds(8, 64, 40, 16)
HEAD_DIM = 64
DECODE, PREFILL = "flashinfer.batch_decode", "flashinfer.batch_prefill"
# Workspaces for partial results and for the plan, in MiB as FlashInfer recommends.
WORKSPACES = tuple(jax.ShapeDtypeStruct((size << 20,), jnp.uint8) for size in (128, 8))

# Constant arguments of FlashInfer's functions. The queries are scaled already.
NO_POSITIONS, NHD, CAUSAL, WHOLE_CONTEXT = 0, 0, 1, -1
NO_CAP, SCALE, ROPE = 0.0, 1.0, (1.0, 1.0)
NO_CUDA_GRAPH, NO_EARLY_LAUNCH = False, False
ANY_SPLIT = -1, False, 0, 0


class HostPlan(NamedTuple):
    """Host-side data of a part's rows, padding included, for FlashInfer's split."""

    qo_indptr: tuple[int, ...]
    kv_indptr: tuple[int, ...]

    @classmethod
    def of(cls, case: Case, rows: slice) -> "HostPlan":
        pages = [-(-tokens // case.bounds.block_size) for tokens in case.seq_lens]

        def indptr(lens: list[int]) -> tuple[int, ...]:
            padding = [0] * (case.bounds.max_num_reqs - len(lens))
            return tuple(np.cumsum([0, *lens, *padding]).tolist())

        return cls(indptr(case.query_lens[rows]), indptr(pages[rows]))


@pytest.fixture(scope="module")
def kernels() -> None:
    """Registers FlashInfer's batch decode and batch prefill as FFI targets of the same arguments.

    Operands are queries float16[N, H, D], keys and values float16[num_blocks, block_size, K, D] and
    a part's metadata; each plans first, in XLA's stream, with the `HostPlan` of its attributes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about themselves
        jax_tvm_ffi = pytest.importorskip("jax_tvm_ffi")
        tvm_ffi = pytest.importorskip("tvm_ffi")
        torch = pytest.importorskip("torch")
        jit = pytest.importorskip("flashinfer.jit")
    dtypes = torch.float16, torch.float16, torch.float16, torch.int32
    kind = *dtypes, HEAD_DIM, HEAD_DIM, NO_POSITIONS, False, False
    decode = jit.gen_batch_decode_module(*kind).build_and_load()
    prefill = jit.gen_batch_prefill_module("fa2", *kind, False).build_and_load()

    def on_host(values: Any) -> Any:
        return tvm_ffi.from_dlpack(np.array(list(values), np.int32))

    def plan_memory(workspaces: Any) -> Any:
        return *workspaces, tvm_ffi.from_dlpack(np.empty(workspaces[1].shape, np.uint8))

    def run_decode(out, *operands):
        *workspaces, q, k, v, _, indptr, indices, last_page_len, _, kv_indptr = operands
        plan = decode.plan(
            *plan_memory(workspaces), on_host(kv_indptr), q.shape[0], NUM_Q_HEADS, NUM_KV_HEADS,
            k.shape[1], NO_CUDA_GRAPH, WHOLE_CONTEXT, NO_CAP, HEAD_DIM, HEAD_DIM, q, k,
        )  # fmt: skip
        decode.run(
            *workspaces, plan, q, k, v, indptr, indices, last_page_len, out, None,
            NHD, WHOLE_CONTEXT, NO_EARLY_LAUNCH, None, NO_CAP, SCALE, *ROPE,
        )  # fmt: skip

    def run_prefill(out, *operands):
        *workspaces, q, k, v, starts, indptr, indices, last_page_len = operands[:-2]
        qo_indptr, kv_indptr = operands[-2:]
        rows, page_size = len(qo_indptr) - 1, k.shape[1]
        lens = np.diff(list(kv_indptr)) * page_size
        plan = prefill.plan(
            *plan_memory(workspaces), *map(on_host, (qo_indptr, kv_indptr, lens)), qo_indptr[-1],
            rows, NUM_Q_HEADS, NUM_KV_HEADS, page_size, NO_CUDA_GRAPH, HEAD_DIM, HEAD_DIM,
            bool(CAUSAL), WHOLE_CONTEXT, *ANY_SPLIT,
        )  # fmt: skip
        prefill.paged_run(
            *workspaces, plan, q, k, v, starts, indptr, indices, last_page_len, out, None,
            CAUSAL, NHD, WHOLE_CONTEXT, NO_EARLY_LAUNCH, *[None] * 8, NO_CAP, SCALE, *ROPE, 0,
        )  # fmt: skip

    for name, function in (DECODE, run_decode), (PREFILL, run_prefill):
        jax_tvm_ffi.register_ffi_target(
            name,
            function,
            arg_spec=["rets", "args", "attrs.qo_indptr", "attrs.kv_indptr"],
            platform="gpu",
            pass_owned_tensor=True,
        )


@functools.partial(jax.jit, static_argnames=("decodes", "prefills"))
def through_kernels(batch, queries, new, cache, *, decodes: HostPlan, prefills: HostPlan):
    meta = flashinfer.build(batch)
    cache = written(cache, new, meta.slot_mapping)

    def attention(target: str, queries: Any, part: flashinfer.PagedPart, plan: HostPlan) -> Any:
        results = jax.ShapeDtypeStruct(queries.shape, queries.dtype), *WORKSPACES
        indptrs = {name: np.array(starts, np.int32) for name, starts in plan._asdict().items()}
        return jax.ffi.ffi_call(target, results)(
            queries,
            cache[:, :, 0],
            cache[:, :, 1],
            part.qo_indptr,
            part.paged_kv_indptr,
            meta.paged_kv_indices,
            part.paged_kv_last_page_len,
            **indptrs,
        )[0]

    rows, tokens = batch.max_num_reqs, jnp.arange(batch.max_num_tokens)
    first = meta.num_decode_tokens
    decoded = attention(DECODE, queries[:rows], meta.decode, decodes)
    prefilled = attention(PREFILL, jnp.roll(queries, -first, axis=0), meta.prefill, prefills)
    is_decode = (tokens < first)[:, None, None]
    return jnp.where(is_decode, decoded[tokens % rows], jnp.roll(prefilled, first, axis=0))


def rounded(array: np.ndarray) -> np.ndarray:
    """The value rounded to float16."""
    return array.astype(np.float16).astype(np.float32)


@hypothesis.settings(max_examples=15)
@given(case=cases(bounds=(LONG,), min_query=1, min_reqs=1))
def test_batch_decode_and_prefill(kernels, case: Case):
    case = case.decodes_first()
    problem = Problem.random(case, head_dim=HEAD_DIM)
    problem = dataclasses.replace(
        problem,
        queries=rounded(problem.queries),
        new=rounded(problem.new),
        contexts=[rounded(context) for context in problem.contexts],
    )
    data = (np.float16(array) for array in (problem.queries, problem.new, problem.cache()))
    num_decodes = case.query_lens.count(1)
    got = through_kernels(
        case.batch(),
        *data,
        decodes=HostPlan.of(case, slice(num_decodes)),
        prefills=HostPlan.of(case, slice(num_decodes, None)),
    )
    problem.check(got.astype(np.float32), tolerance=2e-3)
