"""Hypothesis strategies: small layouts of every kind, and page ids with padding."""

from hypothesis import strategies as st

from tests.util.layout_reference import DTYPES, KIND_LAYOUTS, Layers, ReferenceLayout, spec_of


@st.composite
def reference_layouts(draw, max_pages: int = 5) -> ReferenceLayout:
    """Any layout of any small spec; sizes deliberately include non-powers of two."""
    small = st.integers(1, 4)
    kind, name = draw(st.sampled_from(KIND_LAYOUTS))
    heads, groups = 1, 1
    if kind == "mha":
        heads = draw(st.integers(1, 6))
        if name == "page_unified":
            groups = draw(st.sampled_from([g for g in range(1, 7) if heads % g == 0]))
    spec = spec_of(
        kind,
        num_layers=draw(small),
        page_size=draw(small),
        num_kv_heads=heads,
        head_dim=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    return ReferenceLayout(spec, name, draw(st.integers(1, max_pages)), groups)


@st.composite
def layer_selections(draw, num_layers: int) -> Layers:
    """None, one layer, or a range of them."""
    first = draw(st.integers(0, num_layers - 1))
    last = draw(st.integers(first + 1, num_layers))
    return draw(st.sampled_from([None, first, range(first, last)]))


@st.composite
def token_ranges(draw, page_size: int) -> range:
    """Some tokens of a page, or all."""
    first = draw(st.integers(0, page_size - 1))
    return range(first, draw(st.integers(first + 1, page_size)))


@st.composite
def page_ids(draw, *sides: int) -> list[list[int]]:
    """One list per number of pages: equal lengths, no duplicates, about a fifth padding."""
    n = draw(st.integers(0, min(sides)))
    lists = []
    for pages in sides:
        ids = draw(st.permutations(range(pages)))[:n]
        lists.append([i if draw(st.integers(0, 4)) else draw(st.integers(-9, -1)) for i in ids])
    return lists
