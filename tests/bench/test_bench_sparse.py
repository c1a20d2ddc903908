"""The benchmarks of sparse fetches: rows and their places, methods that take turns, targets."""

import jax
import numpy as np
import pytest

from bench.harness.records import Results
from bench.harness.timing import Figure, Samples
from bench.sparse import decode, fetch, xla_gather
from bench.sparse.inputs import PAGE_SIZE, Cache

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def cache():
    return Cache(656, fetch.SMALL.pool_bytes)


def a_case(cache, reuse):
    return fetch.Case(cache, fetch.SMALL, reuse, batch=2, context=fetch.SMALL.context)


def test_rows_begin_with_their_number_in_all_of_the_pool(cache):
    rows = np.ascontiguousarray(np.asarray(cache.rows)[:, :4]).view(np.int32)[:, 0]
    assert rows.tolist() == [*range(cache.num_pages * PAGE_SIZE)]
    assert cache.pool.data.unsafe_buffer_pointer() == cache.rows.unsafe_buffer_pointer()
    assert cache.num_pages == cache.pool.num_pages == fetch.SMALL.pool_bytes // (656 * PAGE_SIZE)


@pytest.mark.cpu_only
def test_methods_that_take_turns_see_every_step(cache):
    case = a_case(cache, 0.5)
    both = [fetch.Fetches(case, *case.jaxkv()) for _ in range(2)]
    assert all(one.sample() > 0 for _ in range(2) for one in both)
    for one in both:
        one.check()
    before, after = (np.asarray(ids) for ids in both[0].trace.next()[:2])
    kept = [len({*a.tolist()} & {*b.tolist()}) for a, b in zip(before, after, strict=True)]
    assert kept == [fetch.SMALL.k // 2] * 2 and case.missing == sum(kept)


@pytest.mark.cpu_only
def test_wrong_rows_are_found(cache):
    case = a_case(cache, 1.0)
    fetches = fetch.Fetches(case, *case.jaxkv())
    case.table = case.table + 1
    with pytest.raises(AssertionError, match="fetched rows are wrong"):
        fetches.check()


def test_speedup_over_the_published_design_is_that_of_the_rounds(cache, monkeypatch):
    rounds = {fetch.JAXKV: [1.0, 2.0, 4.0], fetch.PUBLISHED: [2.0, 4.0, 4.0]}
    monkeypatch.setattr(fetch, "record", lambda *_: Samples(rounds))
    monkeypatch.setattr(fetch, "link_us", lambda nbytes: 0.5e6 * bool(nbytes))
    results = Results("sparse")
    fetch.compare_equal_sms(results, cache, fetch.SMALL)
    assert [(target.got, target.bound) for target in results.targets] == [(2.0, 8.0), (2.0, None)]


def test_speedup_over_the_gather_has_its_error(monkeypatch):
    gathers = {xla_gather.VIEW: Figure(2e-3, 1e-4), xla_gather.HOST: Figure(9e-3)}
    monkeypatch.setattr(xla_gather, "measure", lambda *_: gathers)
    monkeypatch.setattr(fetch, "link_us", lambda nbytes: nbytes / 1e5)
    monkeypatch.setattr(fetch.peak_bandwidth, "contiguous_copy", lambda *_: ("copy", 50.0))
    results = Results("sparse")
    times = {reuse: Figure(100.0) for reuse in (0.0, fetch.PARTLY, 1.0)}
    fetch.record_targets(results, 656, fetch.SMALL, times)
    gains = [target for target in results.targets if "gather" in target.name]
    assert [(target.got, target.error) for target in gains] == [pytest.approx((20.0, 1.0))] * 3


def test_requests_of_a_decode_step_share_no_page():
    size = decode.SMALL
    _, pool, table = decode.InHostMemory(size).create(size.batch)
    pages = np.asarray(table).ravel()
    assert len({*pages.tolist()}) == size.batch * size.context // PAGE_SIZE
    assert pages.min() >= 0 and pages.max() < pool.num_pages
    jax.block_until_ready(pool)
    pool.close()
