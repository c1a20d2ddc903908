"""Row-by-row split of a batch into decodes and prefills, for the references of builders."""

from typing import NamedTuple

import numpy as np

from tests.util.batches import Case


class Part(NamedTuple):
    """Rows [first, end) of a case, padded to its bounds."""

    case: Case
    first: int
    end: int

    def lens(self, of_all_rows: list[int]) -> np.ndarray:
        """int32[B], those of this part's rows, then 0."""
        out = np.zeros(self.case.bounds.max_num_reqs, np.int32)
        out[: self.end - self.first] = of_all_rows[self.first : self.end]
        return out

    def starts(self, of_all_rows: list[int], *, base: int = 0) -> np.ndarray:
        """int32[B + 1], cumulative sums of this part's rows from `base`, the last repeated."""
        return base + np.cumsum([0, *self.lens(of_all_rows)], dtype=np.int32)

    def tables(self) -> np.ndarray:
        """int32[B, W], block tables of this part's rows, then 0."""
        size = self.case.bounds
        out = np.zeros((size.max_num_reqs, size.max_blocks), np.int32)
        for i, table in enumerate(self.case.tables[self.first : self.end]):
            out[i, : len(table)] = table
        return out


def first_prefill(case: Case, threshold: int = 1, *, uniform: bool = False) -> int:
    """The row at which the decodes end."""
    query = case.query_lens
    if max(query, default=0) <= threshold and (not uniform or threshold <= 1):
        return len(query)
    if query and query[0] > threshold:
        return 0
    for row, tokens in enumerate(query):
        if (tokens not in (query[0], 0)) if uniform else (tokens > threshold):
            return row
    return len(query)


def parts(case: Case, threshold: int = 1, *, uniform: bool = False) -> tuple[Part, Part]:
    """The decodes and the prefills."""
    first = first_prefill(case, threshold, uniform=uniform)
    return Part(case, 0, first), Part(case, first, case.num_reqs)


def counts(case: Case, threshold: int = 1, *, uniform: bool = False) -> dict[str, int]:
    """Fields with the counts of the split."""
    first = first_prefill(case, threshold, uniform=uniform)
    tokens = sum(case.query_lens[:first])
    return {
        "num_actual_tokens": case.num_tokens,
        "num_decodes": first,
        "num_prefills": case.num_reqs - first,
        "num_decode_tokens": tokens,
        "num_prefill_tokens": case.num_tokens - tokens,
    }


def slots(case: Case, *, world_size: int = 1, rank: int = 0, interleave: int = 1) -> np.ndarray:
    """int32[T], slot of each query token, token by token; -1 for other ranks and padding."""
    out = np.full(case.bounds.max_num_tokens, -1, np.int32)
    token, size = 0, case.bounds.block_size
    for query, context, table in zip(case.query_lens, case.seq_lens, case.tables, strict=True):
        for position in range(context - query, context):
            if position // interleave % world_size == rank:
                # Tokens on this rank before this one.
                whole_rounds, rest = divmod(position, world_size * interleave)
                mine = whole_rounds * interleave + rest % interleave
                out[token] = table[mine // size] * size + mine % size
            token += 1
    return out


def equal(got, want: dict) -> None:
    """Every named field, bit for bit, dtype and shape included."""
    for name, value in want.items():
        field = np.asarray(getattr(got, name))
        value = np.asarray(value)
        assert field.dtype == (value.dtype if value.dtype == bool else np.int32), name
        np.testing.assert_array_equal(field, value, err_msg=name, strict=False)
        assert field.shape == value.shape, name
