"""Random batches for metadata tests, under a few sets of bounds to limit compilation."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jaxkv.metadata.common import BatchMetadata


class Bounds(NamedTuple):
    """Static sizes of a batch."""

    max_num_reqs: int
    max_num_tokens: int
    max_blocks: int
    block_size: int


ONE = Bounds(1, 6, 3, 2)
FEW = Bounds(5, 24, 6, 4)
SOME = Bounds(64, 96, 5, 8)
MANY = Bounds(1024, 1536, 4, 16)
# The small ones more often: equally effective, and faster.
ALL_BOUNDS = (ONE, FEW, FEW, FEW, FEW, SOME, SOME, MANY)

# Number of batches on which every builder is compared with its reference; see conftest.py.
every_batch = hypothesis.settings(
    max_examples=hypothesis.settings().max_examples * 10,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch as known to a scheduler: the input of a reference.

    Attributes:
      query_lens: query tokens of each request.
      seq_lens: tokens of each request's context, including those of this step.
      tables: blocks of each request in order; none of them is NULL_BLOCK.
      bounds: static sizes.
    """

    query_lens: list[int]
    seq_lens: list[int]
    tables: list[list[int]]
    bounds: Bounds

    @property
    def num_reqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def starts(self) -> list[int]:
        """`query_start_loc` without padding."""
        return [0, *np.cumsum(self.query_lens, dtype=int).tolist()]

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache: an upper bound of all ids."""
        return num_blocks_of(self.bounds)

    def batch(self) -> BatchMetadata:
        return BatchMetadata.from_host(
            self.query_lens, self.seq_lens, self.tables, **self.bounds._asdict()
        )

    def reordered(self, order: Sequence[int]) -> "Case":
        return dataclasses.replace(
            self,
            query_lens=[self.query_lens[i] for i in order],
            seq_lens=[self.seq_lens[i] for i in order],
            tables=[self.tables[i] for i in order],
        )

    def decodes_first(self, threshold: int = 1) -> "Case":
        """The same requests, those with up to `threshold` query tokens first."""
        return self.reordered(
            sorted(range(self.num_reqs), key=lambda i: self.query_lens[i] > threshold)
        )


def assert_same(got, want) -> None:
    """Equal in values and shape, and int32 as all metadata."""
    got, want = np.asarray(got), np.asarray(want, np.int32)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want, strict=True)


def num_blocks_of(bounds: Bounds) -> int:
    return 1 + bounds.max_num_reqs * bounds.max_blocks


@st.composite
def cases(
    draw,
    *,
    bounds: Sequence[Bounds] = ALL_BOUNDS,
    min_query: int = 0,
    max_query: int | None = None,
    min_reqs: int = 0,
) -> Case:
    """A batch: any number of requests, any of them without query tokens, full, or at a boundary.

    Args:
      bounds: one of these.
      min_query: minimum number of query tokens of a request.
      max_query: maximum number of query tokens of a request.
      min_reqs: minimum number of requests.
    """
    size = draw(st.sampled_from(bounds))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = size.max_num_reqs
    if min_query:
        most = min(most, size.max_num_tokens // min_query)
    num_reqs = draw(st.one_of(st.integers(min_reqs, most), st.sampled_from([min_reqs, 1, most])))
    query = _query_lens(draw, rng, size, num_reqs, min_query, max_query)
    room = size.max_blocks * size.block_size - query
    computed = rng.integers(0, room + 1)
    style = draw(st.sampled_from(["any", "fresh", "full", "aligned"]))
    if style == "fresh":
        computed[rng.random(num_reqs) < 0.5] = 0
    elif style == "full":
        computed = np.where(rng.random(num_reqs) < 0.5, room, computed)
    elif style == "aligned":
        seq = (query + computed) // size.block_size * size.block_size
        computed = np.where(seq >= query, seq - query, computed)
    seq = query + computed
    blocks = rng.permutation(np.arange(1, num_blocks_of(size), dtype=np.int32))
    tables, taken = [], 0
    for length in seq.tolist():
        need = -(-length // size.block_size)
        spare = int(rng.integers(0, size.max_blocks - need + 1)) if style == "any" else 0
        tables.append(blocks[taken : taken + need + spare].tolist())
        taken += need + spare
    return Case(query.tolist(), seq.tolist(), tables, size)


def _query_lens(draw, rng, size: Bounds, num_reqs: int, least: int, most: int | None) -> np.ndarray:
    longest = min(most or size.max_num_tokens, size.max_blocks * size.block_size)
    if draw(st.booleans()):  # a decode step
        query = np.full(num_reqs, min(max(least, 1), longest))
    else:
        query = rng.integers(least, longest + 1, num_reqs)
        query[rng.random(num_reqs) < 0.3] = least
    # Shorten rows, starting at random ones, until the tokens fit.
    excess = int(query.sum()) - size.max_num_tokens
    for row in rng.permutation(num_reqs):
        if excess <= 0:
            break
        cut = min(excess, int(query[row]) - least)
        query[row] -= cut
        excess -= cut
    return query.astype(np.int64)


def padded(values, size: int, fill: int = 0) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
