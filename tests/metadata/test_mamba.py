"""metadata.mamba against slow Python on random batches."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import mamba
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import ALL_BOUNDS, FEW, MANY, ONE, SOME, Case, cases, every_batch


@dataclasses.dataclass(frozen=True)
class Options:
    mode: mamba.Mode = "none"
    chunk_size: int | None = None
    num_spec_tokens: int = 0
    accepted: bool = False
    drafts: bool = False


# And the bounds of its tests: each combination compiles once more.
OPTIONS = {
    Options(): (FEW, SOME),
    Options(chunk_size=1, num_spec_tokens=2, accepted=True): (FEW, ONE),
    Options(mode="align", chunk_size=3, num_spec_tokens=1, accepted=True, drafts=True): ALL_BOUNDS,
    Options(mode="align", chunk_size=8, num_spec_tokens=2): (FEW, SOME),
    Options(mode="all"): (FEW, FEW, MANY),
    Options(mode="all", chunk_size=7, num_spec_tokens=1, accepted=True): (FEW,),
}
batches = st.sampled_from(list(OPTIONS)).flatmap(
    lambda options: st.tuples(cases(bounds=OPTIONS[options]), st.just(options))
)


@functools.cache
def compiled(options: Options):
    def build(batch, rows):
        return mamba.build(
            batch,
            is_prefilling=rows.prefilling,
            mode=options.mode,
            chunk_size=options.chunk_size,
            num_spec_tokens=options.num_spec_tokens,
            num_accepted_tokens=rows.accepted if options.accepted else None,
            num_draft_tokens=rows.drafts if options.drafts else None,
        )

    return jax.jit(build)


class Rows(NamedTuple):
    """Further properties of the rows, each [B]."""

    prefilling: np.ndarray
    accepted: np.ndarray
    drafts: np.ndarray


def random_rows(case: Case, options: Options, rng: np.random.Generator) -> Rows:
    num = case.bounds.max_num_reqs
    late = np.arange(num) >= rng.integers(0, case.num_reqs + 1)
    prefilling = rng.random(num) < np.where(late, 0.8, rng.choice([0.0, 0.1]))
    prefilling[case.num_reqs :] = False
    accepted = rng.integers(1, 2 + options.num_spec_tokens, num).astype(np.int32)
    drafts = rng.integers(-1, 1 + options.num_spec_tokens, num).astype(np.int32)
    return Rows(prefilling, accepted, drafts)


def num_decodes(case: Case, options: Options, rows: Rows) -> int:
    """Rows before the first prefill."""
    threshold = 1 + options.num_spec_tokens if options.accepted else 1
    for r, (q, s) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        verifies = options.drafts and rows.drafts[r] >= 0 and q == rows.drafts[r] + 1
        updates = s > q and (q == 1 or verifies)
        if q > threshold or (rows.prefilling[r] and not updates):
            return r
    return case.num_reqs


def padded(values, shape: tuple[int, ...], fill: int) -> np.ndarray:
    out = np.full(shape, fill, np.int32)
    if len(values):
        out[: len(values)] = values
    return out


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def state_blocks(case: Case, options: Options, r: int) -> list[int]:
    width, size = case.bounds.max_blocks, case.bounds.block_size
    table = case.tables[r] + [0] * (2 * width - len(case.tables[r]))
    if options.mode == "all":
        return table[:width]
    first = max((case.seq_lens[r] - 1) // size, 0) if options.mode == "align" else 0
    return table[first : first + 1 + options.num_spec_tokens]


def cut(size: int, computed: list[int], new: list[int]):
    """Chunks of each row: one up to a multiple of the size, then full ones, then the remainder."""
    starts, rows, last, position = [], [], [], 0
    for row, (before, rest) in enumerate(zip(computed, new, strict=True)):
        pieces = []
        if before % size:
            pieces.append(min(size - before % size, rest))
            rest -= pieces[0]
        while rest:
            pieces.append(min(size, rest))
            rest -= pieces[-1]
        for piece in pieces:
            starts.append(position)
            rows.append(row)
            position += piece
        last.append(len(starts) - 1)
    return [*starts, position], rows, last


def expected(case: Case, options: Options, rows: Rows) -> dict[str, Any]:
    bounds, nd = case.bounds, num_decodes(case, options, rows)
    num, q, s = bounds.max_num_reqs, case.query_lens, case.seq_lens
    computed = [b - a for a, b in zip(q, s, strict=True)]
    starts, size = case.starts, bounds.block_size
    states = [state_blocks(case, options, r) for r in range(case.num_reqs)]
    wide = (num, bounds.max_blocks if options.mode == "all" else 1 + options.num_spec_tokens)
    has_states = [c > 0 for c in computed[nd:]]
    want: dict[str, Any] = {
        "num_prefills": np.int32(case.num_reqs - nd),
        "num_prefill_tokens": np.int32(case.num_tokens - starts[nd]),
        "num_decodes": np.int32(nd),
        "num_decode_tokens": np.int32(starts[nd]),
        "seq_lens": padded(s, (num,), 0),
        "has_initial_states_p": padded(has_states, (num,), 0).astype(bool),
        "prep_initial_states": np.bool_(any(has_states)),
        "query_start_loc_p": padded(
            [t - starts[nd] for t in starts[nd:]], (num + 1,), starts[-1] - starts[nd]
        ),
        "num_computed_tokens_p": padded(computed[nd:], (num,), 0),
        "state_indices_tensor_d": padded(states[:nd], wide, 0),
        "state_indices_tensor_p": padded(states[nd:], wide, 0)
        if options.mode == "all"
        else padded([row[0] for row in states[nd:]], (num,), 0),
        "query_start_loc_d": None,
        "num_accepted_tokens": None,
        "block_idx_last_computed_token": None,
        "block_idx_first_scheduled_token_p": None,
        "block_idx_last_scheduled_token": None,
    }
    if options.num_spec_tokens:
        accepted = rows.accepted[:nd] if options.accepted else q[:nd]
        want["query_start_loc_d"] = padded(starts[: nd + 1], (num + 1,), starts[nd])
        want["num_accepted_tokens"] = padded(accepted, (num,), 1)
    if options.mode == "all":
        want["block_idx_last_computed_token"] = padded(
            [max(ceil(c, size) - 1, 0) for c in computed], (num,), 0
        )
        want["block_idx_first_scheduled_token_p"] = padded(
            [ceil(c + 1, size) - 1 for c in computed[nd:]], (num,), 0
        )
        want["block_idx_last_scheduled_token"] = padded(
            [max(ceil(t, size) - 1, 0) for t in s], (num,), 0
        )
    return want


def assert_chunks(chunks: mamba.Chunks, size: int, computed, new, num_reqs: int) -> None:
    starts, rows, last = cut(size, computed, new)
    limit = chunks.seq_idx_p.shape[0]
    assert len(rows) <= limit
    want = {
        "cu_chunk_seqlen_p": padded(starts, (limit + 1,), starts[-1]),
        "seq_idx_p": padded(rows, (limit,), -1),
        "last_chunk_indices_p": padded(last, (num_reqs,), len(rows) - 1),
    }
    assert [*want] == [*mamba.Chunks._fields]
    for name, value in want.items():
        np.testing.assert_array_equal(getattr(chunks, name), value, err_msg=name, strict=True)


@every_batch
@given(batches, st.integers(0, 2**32 - 1))
def test_build(batch: tuple[Case, Options], seed: int):
    case, options = batch
    rows = random_rows(case, options, np.random.default_rng(seed))
    metadata = compiled(options)(case.batch(), rows)
    want = expected(case, options, rows)
    assert want.keys() | {"chunks", "conv1d"} == {f.name for f in dataclasses.fields(metadata)}
    for name, value in want.items():
        got = getattr(metadata, name)
        if value is None:
            assert got is None
        else:
            np.testing.assert_array_equal(got, value, err_msg=name, strict=True)

    nd = num_decodes(case, options, rows)
    new = case.query_lens[nd:]
    computed = [s - q for q, s in zip(new, case.seq_lens[nd:], strict=True)]
    size = options.chunk_size or (case.bounds.block_size if options.mode == "all" else None)
    if size is None:
        assert metadata.chunks is None
    else:
        assert_chunks(metadata.chunks, size, computed, new, case.bounds.max_num_reqs)

    programs = [(row, i) for row, n in enumerate(new) for i in range(ceil(n, 8))]
    assert len(programs) <= len(metadata.conv1d.batch_ptr)
    for got, of in zip(metadata.conv1d, (0, 1), strict=True):
        want_of = padded([program[of] for program in programs], got.shape, -1)
        np.testing.assert_array_equal(got, want_of, strict=True)


def prefills(computed: list[int], new: list[int]) -> BatchMetadata:
    """Tight bounds for this batch."""
    seq_lens = [c + n for c, n in zip(computed, new, strict=True)]
    return BatchMetadata.from_host(
        new,
        seq_lens,
        [list(range(1, 2 + s // 16)) for s in seq_lens],
        max_num_reqs=len(new),
        max_num_tokens=sum(new),
        max_blocks=8,
        block_size=16,
    )


def build_prefills(computed: list[int], new: list[int], size: int = 4) -> mamba.MambaMetadata:
    rows = Rows(np.ones(len(new), bool), np.ones(0), np.ones(0))
    return compiled(Options(chunk_size=size))(prefills(computed, new), rows)


@pytest.mark.parametrize(
    "computed, new, starts, seq_idx, last",
    [
        ([0, 6, 8], [5, 7, 4], [0, 4, 5, 7, 11, 12, 16], [0, 0, 1, 1, 1, 2], [1, 4, 5]),
        # Rows without tokens refer to the preceding chunk, none, or an empty one.
        ([4, 0, 6, 8], [0, 5, 0, 0], [0, 4, 5, 5], [1, 1, 2], [-1, 1, 2, 2]),
    ],
)
def test_chunks(computed, new, starts, seq_idx, last):
    chunks = build_prefills(computed, new).chunks
    assert chunks is not None
    assert chunks.cu_chunk_seqlen_p[: len(starts)].tolist() == starts
    assert chunks.seq_idx_p[: len(seq_idx)].tolist() == seq_idx
    assert chunks.last_chunk_indices_p.tolist() == last


@pytest.mark.parametrize(
    "size, computed, new",
    [
        pytest.param(4, [3, 7], [2, 2], id="two chunks each"),
        pytest.param(4, [3, 7, 11], [2, 6, 10], id="further chunks"),
        pytest.param(16, [15, 1, 31], [2, 1, 2], id="not two for all"),
        pytest.param(1, [3, 5], [6, 1], id="chunks of one token"),
    ],
)
def test_bound_of_chunks_is_reached(size, computed, new):
    chunks = build_prefills(computed, new, size).chunks
    assert chunks is not None and np.all(chunks.seq_idx_p >= 0)
    assert_chunks(chunks, size, computed, new, len(new))


@pytest.mark.parametrize("new", [[1], [1, 1, 1], [9, 17, 1], [8]])
def test_bound_of_conv1d_programs_is_reached(new):
    assert np.all(build_prefills([0] * len(new), new).conv1d.batch_ptr >= 0)


def test_short_extends_with_a_state_are_decodes():
    # One token; three, including two drafts; a first token; three of a prompt.
    batch = prefills([5, 9, 0, 7], [1, 3, 1, 3])
    rows = Rows(np.ones(4, bool), np.ones(4, np.int32), np.array([-1, 2, -1, -1], np.int32))
    assert compiled(Options())(batch, rows).num_decodes == 1
    padded_tail = Options(num_spec_tokens=2, accepted=True, drafts=True)
    assert compiled(padded_tail)(batch, rows).num_decodes == 2


def test_states_past_the_table_are_null():
    batch = BatchMetadata.from_host(
        [1], [32], [[3, 4]], max_num_reqs=2, max_num_tokens=2, max_blocks=2, block_size=16
    )
    states = mamba.state_indices(batch, mode="align", num_spec_tokens=1)
    assert states.tolist() == [[4, 0], [0, 0]]


def test_invalid_arguments_raise():
    batch = prefills([0], [1])
    prompt = np.ones(1, bool)
    with pytest.raises(ValueError, match=r"mode must be one of .* got 'some'"):
        mamba.build(batch, is_prefilling=prompt, mode="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mode must be one of .* got 'some'"):
        mamba.state_indices(batch, mode="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        mamba.build(batch, is_prefilling=prompt, chunk_size=0)
    with pytest.raises(ValueError, match=r"num_spec_tokens must be in \[0, 8\), got 8"):
        mamba.build(batch, is_prefilling=prompt, num_spec_tokens=8)
    with pytest.raises(ValueError, match="num_draft_tokens requires num_spec_tokens >= 2, got 0"):
        mamba.build(batch, is_prefilling=prompt, num_draft_tokens=np.full(1, 2, np.int32))
    with pytest.raises(ValueError, match="num_draft_tokens must be int32, got float32"):
        mamba.build(batch, is_prefilling=prompt, num_draft_tokens=np.ones(1, np.float32))
    with pytest.raises(ValueError, match=r"is_prefilling must be bool\[1\], got int32"):
        mamba.build(batch, is_prefilling=np.full(1, 2, np.int32))
    with pytest.raises(ValueError, match="num_accepted_tokens requires num_spec_tokens >= 1, got"):
        mamba.build(batch, is_prefilling=prompt, num_accepted_tokens=np.ones(1, np.int32))


@pytest.mark.parametrize("accepted", [-1, 0, 3, 2**31 - 1])
def test_accepted_tokens_out_of_range_raise(accepted):
    """They select the state of a decode; those of other rows are not read."""
    batch = BatchMetadata.from_host(
        [2, 0, 2, 1], [6, 5, 7, 3], [[1, 2], [3, 4], [5, 6], [7, 8]],
        max_num_reqs=5, max_num_tokens=8, max_blocks=2, block_size=4,
    )  # fmt: skip
    prefilling = np.array([False, False, False, True, False])
    build = functools.partial(mamba.build, batch, num_spec_tokens=1)
    counts = np.array([1, accepted, 2, accepted, accepted], np.int32)
    got = build(is_prefilling=prefilling, num_accepted_tokens=counts)
    assert got.num_accepted_tokens is not None
    assert got.num_accepted_tokens.tolist()[:3:2] == [1, 2]
    counts[2] = accepted
    message = rf"mamba.build: the accepted tokens of row 2 must be in \[1, 2\], .* got {accepted}"
    with pytest.raises(ValueError, match=message):
        build(is_prefilling=prefilling, num_accepted_tokens=counts)


@pytest.mark.parametrize("name", ["is_prefilling", "num_accepted_tokens", "num_draft_tokens"])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (4, 1)])
def test_different_number_of_rows_raises(name, shape):
    rows = {"is_prefilling": np.zeros(4, bool), "num_accepted_tokens": np.ones(4, np.int32)}
    arguments = rows | {name: np.ones(shape, rows["is_prefilling"].dtype)}
    with pytest.raises(ValueError, match=rf"{name} must be \[4 rows\], got \{str(shape)[:-1]}"):
        mamba.build(prefills([4] * 4, [1] * 4), num_spec_tokens=1, **arguments)
