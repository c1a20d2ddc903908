"""Replay of a trace through the offload manager, compared with independent simulators; tiers."""

import json
from functools import partial
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness import records
from bench.offload import tiers, trace
from jaxkv._src.offload import writes
from jaxkv.offload import FileTier, OffloadManager

pytestmark = pytest.mark.host_only


def simulate(requests, capacity, second_use):
    """LRU lists as plain Python lists, least recently used first."""
    cache: list[int] = []
    used: set[int] = set()
    hits = written = 0
    for request in requests:
        missing = [i for i, block in enumerate(request) if block not in cache]
        hits += missing[0] if missing else len(request)
        new = [request[i] for i in missing if not second_use or request[i] in used]
        used.update(request)
        resident = [block for block in request if block in cache]
        new = new[: capacity - len(resident)]
        cache = [block for block in cache if block not in request]
        cache = cache[max(0, len(cache) + len(resident) + len(new) - capacity) :]
        cache += [block for block in reversed(request) if block in new or block in resident]
        written += len(new)
    return hits, written


@st.composite
def traces(draw):
    """Requests that continue a prefix of an earlier one, as turns of a conversation do."""
    blocks = iter(range(10**6))
    requests: list[list[int]] = []
    for _ in range(draw(st.integers(1, 30))):
        earlier = draw(st.sampled_from(requests)) if requests else []
        shared = earlier[: draw(st.integers(0, 8))]
        requests.append([*shared, *(next(blocks) for _ in range(draw(st.integers(0, 4))))])
    return requests


@given(traces(), st.integers(1, 12), st.booleans())
def test_hits_and_writes_are_those_of_an_lru_simulator(requests, capacity, second_use):
    manager = OffloadManager(capacity, write="second_use" if second_use else "through")
    keys = [[block.to_bytes(36, "big") for block in request] for request in requests]
    found = trace.replay(keys, manager)
    expected = simulate(requests, capacity, second_use)
    assert (found.hits, found.written) == expected
    assert trace.simulate(keys, capacity, second_use=second_use) == found
    assert found.blocks == sum(map(len, requests))


@given(traces(), st.integers(1, 6), st.integers(12, 16))
def test_simulator_forgets_uses_as_the_manager_does(requests, capacity, remembered):
    """On the trace more blocks are used than remembered."""
    keys = [[block.to_bytes(36, "big") for block in request] for request in requests]
    with (
        mock.patch.object(writes, "_MIN_REMEMBERED", remembered),
        mock.patch.object(trace, "REMEMBERED", remembered),
    ):
        found = trace.replay(keys, OffloadManager(capacity, write="second_use"))
        assert trace.simulate(keys, capacity, second_use=True) == found


def test_write_back_stores_evicted_blocks_and_serves_them():
    keys = [[b"a", b"b"], [b"c"], [b"a", b"b"]]
    manager = OffloadManager(4, write="back")
    found = trace.replay(keys, manager, device_blocks=2)
    # b is evicted for c, and stored; a is still in the device cache.
    assert (found.hits, found.written) == (2, 2)
    assert trace.replay(keys, OffloadManager(4), device_blocks=3).written == 3


def test_replay_of_a_file_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([0, 1], [0, 1, 2])))
    saved = []
    monkeypatch.setattr(records.Results, "save", lambda self, out: saved.append(self))
    assert trace.main([str(path)]) == 0
    (found,) = saved
    assert found.device == records.HOST
    values = {(row.case, row.metric): row.value for row in found.rows}
    assert values["3,000 blocks lru through", "hit rate"] == pytest.approx(100 * 2 / 5)
    assert values["3,000 blocks lru through", "blocks written"] == pytest.approx(100 * 3 / 5)
    assert "10,000 blocks arc second_use" in capsys.readouterr().out
    checks = {check.name: (check.got, check.want, check.met) for check in found.checks}
    assert len(checks) == 3 * 2 * 2 and all(met for _, _, met in checks.values())
    assert checks["hits, 3,000 blocks lru through"] == (2, 2, True)
    assert checks["writes, 30,000 blocks lru second_use"] == (2, 2, True)
    assert [target.name for target in found.targets] == [
        "blocks written, 10,000 blocks lru second_use",
        "hit rate lost, 10,000 blocks lru second_use",
    ]


def test_tiers_are_measured_and_left_empty(tmp_path, capsys):
    open_tier = partial(FileTier, tmp_path, 4096, 1 << 20)
    tiers.report("files", open_tier, total=4 * 4096, rounds=3)
    assert capsys.readouterr().out.startswith("files ")
    assert not [*tmp_path.rglob("*.kv")]


def test_wrong_bytes_of_a_tier_are_no_measurement(tmp_path):
    class Wrong(FileTier):
        def read(self, key, into):
            future = super().read(key, into)
            future.result()
            into[0] ^= 1
            return future

    with pytest.raises(RuntimeError, match="not those written"):
        tiers.measure(partial(Wrong, tmp_path, 4096, 1 << 20), total=4096)
