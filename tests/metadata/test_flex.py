"""metadata.flex against slow Python on random batches, and attention through it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import flex
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import ALL_BOUNDS, FEW, MANY, ONE, SOME, Case, cases, every_batch

NUM_RANGES = 2
NUM_PAIRS = 512


@dataclasses.dataclass(frozen=True)
class Options:
    causal: bool = True
    sliding_window: int | None = None
    prefix: bool = False


# And the bounds of its tests: each combination compiles once more.
OPTIONS = {
    Options(): ALL_BOUNDS,
    Options(causal=False): (FEW, SOME),
    Options(sliding_window=5): (*[FEW] * 7, MANY),
    Options(causal=False, sliding_window=3): (FEW, ONE),
    Options(sliding_window=4, prefix=True): (FEW, FEW, SOME),
}


@functools.cache
def compiled(options: Options):
    """Builds the metadata and evaluates its mask."""

    def build(batch, num_blocks, ranges=None, q=0, kv=0):
        metadata = flex.build(
            batch,
            num_blocks=num_blocks,
            causal=options.causal,
            sliding_window=options.sliding_window,
            mm_prefix_range=ranges if options.prefix else None,
        )
        return metadata, metadata.mask(q, kv)

    return jax.jit(build, static_argnums=1)


@st.composite
def shared(draw, *, bounds=None, styles=("own", "prefix", "anywhere")) -> tuple[Case, Options]:
    """A batch in which requests share blocks, at the front of a context or anywhere."""
    options = draw(st.sampled_from(list(OPTIONS)))
    case = draw(cases(bounds=bounds or OPTIONS[options]))
    style = draw(st.sampled_from(styles))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = [list(row) for row in case.tables]
    for i, row in enumerate(tables):
        if style == "prefix" and i and rng.random() < 0.7:
            same = tables[int(rng.integers(i))][: int(rng.integers(len(row) + 1))]
            row[: len(same)] = same
        if style == "anywhere":
            few = min(case.num_blocks, int(rng.integers(2, 40)))
            row[:] = rng.integers(0, few, len(row)).tolist()  # including the null block
            if case.query_lens[i]:
                last = (case.seq_lens[i] - 1) // case.bounds.block_size
                row[last] = max(row[last], 1)
    return dataclasses.replace(case, tables=tables), options


def random_ranges(case: Case, rng: np.random.Generator) -> np.ndarray:
    longest = case.bounds.max_blocks * case.bounds.block_size
    ranges = rng.integers(0, longest, (case.bounds.max_num_reqs, NUM_RANGES, 2))
    ranges[rng.random(ranges.shape[:2]) < 0.3] = 0
    return ranges.astype(np.int32)


class Reference:
    """Meaning of the metadata, one token and one slot at a time."""

    def __init__(self, case: Case, options: Options, ranges: np.ndarray):
        self.case, self.options, self.ranges = case, options, ranges
        self.tokens = [
            (r, s - q + k)
            for r, (q, s) in enumerate(zip(case.query_lens, case.seq_lens, strict=True))
            for k in range(q)
        ]
        self.places: list[dict[int, int]] = []
        for row, s in zip(case.tables, case.seq_lens, strict=True):
            used = row[: -(-s // case.bounds.block_size)]
            self.places.append({block: j for j, block in enumerate(used) if block != 0})

    def logical_to_logical(self, r: int, lq: int, lkv: int) -> bool:
        ok = lq >= lkv or not self.options.causal
        if self.options.sliding_window is not None:
            ok = ok and abs(lq - lkv) < self.options.sliding_window
        if self.options.prefix:
            ok = ok or any(
                a < b and a <= lq <= b and a <= lkv <= b for a, b in self.ranges[r].tolist()
            )
        return ok and lkv < self.case.seq_lens[r]

    def mask(self, q: int, kv: int) -> bool:
        size = self.case.bounds.block_size
        if not 0 <= q < len(self.tokens) or not 0 <= kv < self.case.num_blocks * size:
            return False
        r, lq = self.tokens[q]
        place = self.places[r].get(kv // size)
        return place is not None and self.logical_to_logical(r, lq, place * size + kv % size)

    def sees(self, q: int) -> list[tuple[int, int]]:
        """(place, block) with a slot visible to the token, in order."""
        r, lq = self.tokens[q]
        size = self.case.bounds.block_size
        return sorted(
            (place, block)
            for block, place in self.places[r].items()
            if any(self.logical_to_logical(r, lq, place * size + o) for o in range(size))
        )

    def block_list(self, group: int) -> list[int]:
        by_request: dict[int, set[tuple[int, int]]] = {}
        for q in range(group * 16, min(group * 16 + 16, len(self.tokens))):
            by_request.setdefault(self.tokens[q][0], set()).update(self.sees(q))
        blocks = [block for _, found in sorted(by_request.items()) for _, block in sorted(found)]
        return list(dict.fromkeys(blocks))


def assert_block_lists(metadata: flex.FlexMetadata, reference: Reference) -> None:
    got, counts = np.asarray(metadata.kv_indices), np.asarray(metadata.kv_num_blocks)
    assert got.dtype == counts.dtype == np.int32
    for group in range(got.shape[0]):
        want = reference.block_list(group)
        assert counts[group] == len(want)
        np.testing.assert_array_equal(got[group], want + [-1] * (got.shape[1] - len(want)))


def random_pairs(
    case: Case, reference: Reference, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and slots, some of them invalid, many of one request."""
    size = case.bounds.block_size
    q = rng.integers(-3, case.bounds.max_num_tokens + 3, NUM_PAIRS).astype(np.int32)
    kv = rng.integers(-3, case.num_blocks * size + 3, NUM_PAIRS).astype(np.int32)
    draws = rng.integers(0, 2**31, (NUM_PAIRS // 2, 2)).tolist()
    for i, (column, offset) in enumerate(draws):
        if 0 <= q[i] < case.num_tokens and (row := case.tables[reference.tokens[q[i]][0]]):
            kv[i] = row[column % len(row)] * size + offset % size
    return q, kv


@every_batch
@given(shared(), st.integers(0, 2**32 - 1))
def test_build(batch: tuple[Case, Options], seed: int):
    case, options = batch
    rng = np.random.default_rng(seed)
    ranges = random_ranges(case, rng)
    reference = Reference(case, options, ranges)
    q, kv = random_pairs(case, reference, rng)
    metadata, mask = compiled(options)(case.batch(), case.num_blocks, ranges, q, kv)

    doc_ids = np.full(case.bounds.max_num_tokens, -1, np.int32)
    doc_ids[: case.num_tokens] = [r for r, _ in reference.tokens]
    np.testing.assert_array_equal(metadata.doc_ids, doc_ids)
    logical = np.full((case.bounds.max_num_reqs, case.num_blocks), -1, np.int32)
    for r, places in enumerate(reference.places):
        logical[r, list(places)] = list(places.values())
    assert metadata.physical_to_logical.dtype == np.int16
    assert np.array_equal(metadata.physical_to_logical, logical)
    assert_block_lists(metadata, reference)
    want = [reference.mask(*pair) for pair in zip(q.tolist(), kv.tolist(), strict=True)]
    np.testing.assert_array_equal(mask, want)


def batch_of(tables, seq_lens, query_lens, *, block_size=16, max_num_reqs=None) -> BatchMetadata:
    return BatchMetadata.from_host(
        query_lens,
        seq_lens,
        tables,
        max_num_reqs=max_num_reqs or len(tables),
        max_num_tokens=sum(query_lens),
        max_blocks=max(map(len, tables)),
        block_size=block_size,
    )


def test_duplicate_blocks_map_to_last_column():
    one = flex.physical_to_logical(batch_of([[6, 0, 0, 0]], [16], [16]), 8)
    assert one[0].tolist() == [-1, -1, -1, -1, -1, -1, 0, -1]
    several = flex.physical_to_logical(batch_of([[2, 2, 5]], [48], [1]), 6)
    assert several[0].tolist() == [-1, -1, 1, -1, -1, 2]


@pytest.mark.parametrize(("width", "dtype"), [(2**15, np.int16), (2**15 + 1, np.int32)])
def test_columns_fit_the_dtype_of_the_map(width, dtype):
    block_size = 16
    batch = batch_of([[*range(1, width + 1)]], [width * block_size], [1])
    metadata = flex.build(batch, num_blocks=width + 1)
    assert metadata.physical_to_logical.dtype == dtype
    assert metadata.physical_to_logical[0, 1:].tolist() == list(range(width))
    last_slot = width * block_size + block_size - 1
    valid, q, kv = metadata.to_logical(0, last_slot)
    assert valid and q == kv == width * block_size - 1
    assert q.dtype == kv.dtype == np.int32


def test_blocks_of_prefix_range_after_queries_are_listed():
    # An image of tokens 8..40 makes the next two blocks visible to the tokens of the first.
    batch = batch_of([[1, 2, 3, 4]], [64], [64])
    ranges = np.array([[[8, 40]]], np.int32)
    metadata, _ = compiled(Options(prefix=True))(batch, 5, ranges)
    assert metadata.kv_indices.tolist() == [[1, 2, 3, -1]] * 3 + [[1, 2, 3, 4]]
    metadata, _ = compiled(Options())(batch, 5)
    assert metadata.kv_indices[0].tolist() == [1, -1, -1, -1]


@pytest.mark.parametrize("end", [2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("start", [0, -3, -(2**31)])
def test_prefix_ranges_past_the_context_list_all_of_it(start, end):
    """Two requests have tokens in the last group; both have their blocks."""
    batch = batch_of([[1, 2, 5], [3, 4]], [48, 32], [40, 4])
    build = compiled(Options(sliding_window=4, prefix=True))
    metadata, _ = build(batch, 6, np.array([[[start, end]], [[0, 0]]], np.int32))
    assert metadata.kv_indices.tolist() == [[1, 2, 5, -1, -1]] * 2 + [[1, 2, 5, 4, -1]]
    assert metadata.kv_num_blocks.tolist() == [3, 3, 4]


@pytest.mark.parametrize(
    "num_reqs, context, query, num_blocks, window, counts, width",
    [
        pytest.param(20, 64, 1, 1000, None, [16 * 4, 4 * 4], 16 * 4, id="decodes"),
        pytest.param(20, 64, 1, 81, None, [16 * 4, 4 * 4], 16 * 4, id="decodes, small cache"),
        pytest.param(1, 64, 16, 1000, None, [4], 4, id="one prefill"),
        pytest.param(1, 640, 640, 41, None, list(range(1, 41)), 40, id="all of the cache"),
        # 16 tokens and the 17 before them: positions 47..79 of the context.
        pytest.param(1, 80, 17, 1000, 18, [3, 2], 3, id="window"),
        pytest.param(2, 640, 1, 1000, 1, [2], 4, id="window of one token"),
    ],
)
def test_bounds_of_the_block_list(num_reqs, context, query, num_blocks, window, counts, width):
    blocks = np.arange(1, 1 + num_reqs * context // 16).reshape(num_reqs, -1).tolist()
    batch = batch_of(blocks, [context] * num_reqs, [query] * num_reqs)
    metadata, _ = compiled(Options(sliding_window=window))(batch, num_blocks)
    assert metadata.kv_num_blocks.tolist() == counts
    assert metadata.kv_indices.shape == (len(counts), width)


def test_spans_reach_their_bound():
    # Every request starts within a group: the number of spans is groups plus requests, less one.
    batch = batch_of([[1, 2]] * 3, [24] * 3, [20] * 3)
    spans = flex.spans_of(batch, True, None, None)
    assert spans.row.tolist() == [0, 0, 1, 1, 2, 2]
    assert spans.group.tolist() == [0, 1, 1, 2, 2, 3]
    # At most the number of tokens.
    assert flex.spans_of(batch_of([[1]] * 3, [1] * 3, [1] * 3), True, None, None).row.shape == (3,)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
def test_a_window_above_int32_is_no_window(window):
    batch = batch_of([[1, 2]], [20], [3])
    got, mask = compiled(Options(sliding_window=window))(batch, 3, None, 2, jnp.arange(48))
    want, all_visible = compiled(Options())(batch, 3, None, 2, jnp.arange(48))
    assert mask.tolist() == all_visible.tolist() and mask.sum() == 20
    assert got.kv_indices.tolist() == want.kv_indices.tolist()
    assert flex.encoder_mask(got.doc_ids, 2, jnp.arange(3), sliding_window=window).all()


def test_invalid_arguments_raise():
    batch = batch_of([[1]], [1], [1])
    with pytest.raises(ValueError, match="sliding_window must be >= 1 token, got 0"):
        flex.build(batch, num_blocks=2, sliding_window=0)
    for num_blocks in (0, -1):
        with pytest.raises(ValueError, match=rf"num_blocks must be >= 1 .*, got {num_blocks}"):
            flex.build(batch, num_blocks=num_blocks)
    with pytest.raises(ValueError, match="num_blocks=134217729 blocks of 16 tokens exceed"):
        flex.build(batch, num_blocks=2**27 + 1)
    metadata, beyond = flex.build(batch, num_blocks=2, updatable=True), batch_of([[2]], [1], [1])
    with pytest.raises(ValueError, match=r"flex.build: block_table .* num_blocks=2, got 2"):
        flex.build(beyond, num_blocks=2)
    with pytest.raises(ValueError, match=r"flex.update: block_table .* num_blocks=2, got 2"):
        flex.update(metadata, beyond)


# --------------------------------------------------------------------------------------------------
# Attention


def softmax_attention(q, keys, values, mask):
    """Attention of q [T, D] to keys, values [T, K, D] under mask [T, K]; 0 for empty mask rows."""
    scores = jnp.where(mask, jnp.einsum("td,tkd->tk", q, keys), -jnp.inf)
    top = jnp.max(scores, axis=1, keepdims=True, initial=-1e30)
    weights = jnp.exp(scores - top)
    total = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-30)
    return jnp.einsum("tk,tkd->td", weights / total, values)


@jax.jit
def attend_everywhere(metadata, q, keys, values):
    """By the mask alone, over all slots of the cache."""
    tokens, slots = jnp.arange(q.shape[0]), jnp.arange(keys.shape[0])
    keys, values = (jnp.broadcast_to(x, (q.shape[0], *x.shape)) for x in (keys, values))
    return softmax_attention(q, keys, values, metadata.mask(tokens[:, None], slots))


@jax.jit
def attend_by_blocks(metadata, q, keys, values):
    """Over the slots of the blocks listed for each group, as in a kernel."""
    tokens, size = jnp.arange(q.shape[0]), metadata.block_size
    group = tokens // flex.Q_BLOCK_SIZE
    index = jnp.arange(metadata.kv_indices.shape[1])
    listed = index < metadata.kv_num_blocks[group][:, None]
    blocks = jnp.where(listed, metadata.kv_indices[group], 0)
    slots = (blocks[..., None] * size + jnp.arange(size)).reshape(q.shape[0], -1)
    mask = metadata.mask(tokens[:, None], slots) & jnp.repeat(listed, size, axis=1)
    return softmax_attention(q, keys[slots], values[slots], mask)


def dense_attention(case: Case, reference: Reference, q, keys, values) -> np.ndarray:
    """Token by token over the request's context."""
    size, out = case.bounds.block_size, []
    for token, (r, lq) in enumerate(reference.tokens):
        seen = [p for p in range(case.seq_lens[r]) if reference.logical_to_logical(r, lq, p)]
        slots = [case.tables[r][p // size] * size + p % size for p in seen]
        weights = np.exp(keys[slots].astype(np.float64) @ q[token])
        out.append(weights / weights.sum() @ values[slots])
    return np.reshape(out, (case.num_tokens, q.shape[1]))


@given(shared(bounds=(FEW,), styles=["own", "prefix"]), st.integers(0, 2**32 - 1))
def test_attention(batch: tuple[Case, Options], seed: int):
    case, options = batch
    rng = np.random.default_rng(seed)
    ranges = random_ranges(case, rng)
    metadata, _ = compiled(options)(case.batch(), case.num_blocks, ranges)
    slots = case.num_blocks * case.bounds.block_size
    q, keys, values = (
        rng.normal(size=(n, 8)).astype(np.float32)
        for n in (case.bounds.max_num_tokens, slots, slots)
    )
    want = dense_attention(case, Reference(case, options, ranges), q, keys, values)
    for attend in (attend_everywhere, attend_by_blocks):
        got = attend(metadata, q, keys, values)[: case.num_tokens]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@given(cases(bounds=(FEW,)), st.sampled_from([None, 3]))
def test_encoder_mask(case: Case, window: int | None):
    owner = np.repeat(np.arange(case.num_reqs), case.query_lens).tolist()
    tokens = np.arange(-2, case.bounds.max_num_tokens + 2, dtype=np.int32)
    want = [
        [
            all(0 <= t < case.num_tokens for t in (q, kv))
            and owner[q] == owner[kv]
            and (window is None or abs(q - kv) < window)
            for kv in tokens.tolist()
        ]
        for q in tokens.tolist()
    ]
    doc_ids = flex.document_ids(case.batch())
    got = flex.encoder_mask(doc_ids, tokens[:, None], tokens, sliding_window=window)
    np.testing.assert_array_equal(got, want)


def test_bidirectional_window_lists_all_blocks():
    batch = BatchMetadata.from_host(
        [48], [48], [range(1, 49)],
        max_num_reqs=1, max_num_tokens=48, max_blocks=48, block_size=1,
    )  # fmt: skip
    got = flex.build(batch, num_blocks=49, causal=False, sliding_window=9)
    assert got.kv_num_blocks[1] == (got.kv_indices[1] >= 0).sum() == 32
