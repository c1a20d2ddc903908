"""`python -m jaxkv.tune`: verification before timing, and use of the written table."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxkv._src.autotune import copies as autotune_copies
from jaxkv._src.autotune import measurement
from jaxkv._src.autotune.copies import Cell
from jaxkv._src.transfer import dispatch
from jaxkv._src.tuning import copy_lookup, copy_table
from jaxkv._src.tuning.copy_table import Candidate, CopySize, Implementation

HOST = (Candidate("host", 0),)


@pytest.mark.cpu_only
def test_command_writes_valid_table(tmp_path):
    out = tmp_path / "cpu.json"
    command = [sys.executable, "-m", "jaxkv.tune", "--quick", "--out", str(out)]
    output = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "JAXKV_COMMIT": "c0ffee" * 7, "JAX_PLATFORMS": "cpu"},
    ).stdout
    table = copy_table.load(out)
    assert (table.device_kind, table.how) == ("cpu", "python -m jaxkv.tune --quick")
    assert table.source == "cpu.json (commit c0ffeec0f)"
    assert table.date and table.versions["jax"] == jax.__version__
    assert {*table.peak_gb_per_s} == {"load", "store", "device"}
    for direction in ("load", "store", "device"):
        [rule] = table.rules[direction]
        [candidate] = rule.candidates
        assert candidate.implementation == "host" and candidate.gb_per_s
    assert table.rules["overlapped"] == copy_lookup.default_table().rules["overlapped"]
    assert out.read_text() in output
    assert "choices that differ from default.json" in output


@pytest.mark.cpu_only
@pytest.mark.parametrize("direction", ["load", "store", "device"])
@pytest.mark.parametrize("run_bytes", [2, 513, 4096])
def test_rate_is_measured_after_verification(direction, run_bytes):
    [measured] = autotune_copies.measure(Cell(direction, run_bytes, 20, HOST))
    assert measured.implementation == "host" and measured.gb_per_s


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "direction, short_payload, copies",
    [
        ("load", 321, autotune_copies.COPIES_OF_SHORT),
        ("load", 320, 1),
        ("device", 320, autotune_copies.COPIES_OF_SHORT),
    ],
    ids=["short", "long", "within the device"],
)
def test_rate_counts_all_payload_bytes(monkeypatch, direction, short_payload, copies):
    timed = []

    def seconds(step, array):
        timed.append(str(jax.make_jaxpr(step)(array)).count("name=copy"))
        return 2.0

    monkeypatch.setattr(measurement, "seconds_per_step", seconds)
    monkeypatch.setattr(autotune_copies, "SHORT_PAYLOAD", short_payload)
    cell = Cell(direction, 64, 5, HOST)
    rate = autotune_copies._rate(cell, autotune_copies._Data.of(cell), *HOST)
    assert timed == [copies]
    assert rate == pytest.approx(copies * 5 * 64 / 2.0 / 1e9)


@pytest.mark.cpu_only
def test_unsupported_candidates_are_skipped():
    candidates = (Candidate("dma", 0), Candidate("kernel", 4), Candidate("pallas", 4))
    assert autotune_copies.measure(Cell("load", 64, 5, candidates)) == []


@pytest.mark.cpu_only
@pytest.mark.parametrize("where", ["moved", "neighbour"])
def test_incorrect_destination_raises(monkeypatch, where):
    swap_blocks = autotune_copies.jaxkv.swap_blocks

    def wrong(source, destination, source_ids, destination_ids):
        out = swap_blocks(source, destination, source_ids, destination_ids)
        named = np.zeros(len(out), bool)
        named[cell_ids[1]] = True
        [block, *_] = np.flatnonzero(named == (where == "moved"))
        return out.at[block, 0].add(1)

    cell = Cell("device", 64, 5, HOST)
    cell_ids = autotune_copies._Data.of(cell).ids
    monkeypatch.setattr(autotune_copies.jaxkv, "swap_blocks", wrong)
    monkeypatch.setattr(measurement, "seconds_per_step", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(RuntimeError, match=r"device, 5 x 64 bytes: incorrect destination of host"):
        autotune_copies.measure(cell)


def test_sm_count_increases_while_rate_improves(monkeypatch):
    rates = {1: 10.0, 2: 20.0, 4: 20.5, 8: 40.0}
    asked = []

    def rate(cell, data, candidate):
        asked.append(candidate.num_sms)
        return rates[candidate.num_sms]

    monkeypatch.setattr(autotune_copies, "_rate", rate)
    candidates = tuple(Candidate("kernel", sms) for sms in rates)
    measured = autotune_copies.measure(Cell("load", 64, 5, candidates))
    assert asked == [1, 2, 4]
    assert [candidate.gb_per_s for candidate in measured] == [10.0, 20.0, 20.5]


def test_each_candidate_is_forced(monkeypatch):
    """Also right after another candidate was measured on the same shapes."""
    seen = []
    select_implementation = dispatch.select_implementation

    def note(*args, **options):
        chosen = select_implementation(*args, **options)
        seen.append((chosen.implementation, chosen.num_sms))
        raise NotImplementedError("seen")

    monkeypatch.setattr("jaxkv._src.transfer.api.select_implementation", note)
    monkeypatch.setattr(dispatch, "_machine", lambda: dispatch.Machine("gpu", "Some GPU", True))
    names: list[tuple[Implementation, int]] = [("dma", 0), ("kernel", 4), ("pallas", 2)]
    autotune_copies.measure(Cell("load", 128, 5, tuple(Candidate(*name) for name in names)))
    assert seen == names


@pytest.mark.parametrize("quick", [False, True])
def test_gpu_cells(quick):
    cells = autotune_copies.cells("gpu", 132, quick)
    assert len({(cell.direction, cell.size) for cell in cells}) == len(cells)
    assert all(cell.size.total_bytes <= autotune_copies.MAX_PAYLOAD for cell in cells)
    for direction in ("load", "store"):
        sizes = [cell.size for cell in cells if cell.direction == direction]
        assert {2, 16} <= {size.word_bytes for size in sizes}
        assert min(size.run_bytes for size in sizes) == 512
        assert max(size.run_bytes for size in sizes) >= 256 * 1024
    for cell in cells:
        sms = [(c.implementation, c.num_sms) for c in cell.candidates]
        assert sms == sorted(sms) and ("dma", 0) in sms


def test_changes_are_reported_for_both_kinds_of_ids():
    rates = [
        (
            Cell("load", 65536, 1000, ()),
            [Candidate("dma", 0, 54.0), Candidate("kernel", 4, 50.0), Candidate("kernel", 8, 55.0)],
        ),
        (Cell("load", 512, 1000, ()), [Candidate("dma", 0, 1.0), Candidate("kernel", 12, 48.0)]),
    ]
    before = copy_lookup.default_table()
    rules = {
        **before.rules,
        "load": autotune_copies.rules_of([(cell.size, m) for cell, m in rates]),
    }
    after = copy_table.Table(**{**vars(before), "rules": rules})
    assert after.rule("load", CopySize(16, 65536, 1 << 30)).candidates[0].implementation == "dma"
    assert autotune_copies.changes(rates, before, after) == [
        "load, 1000 x 65536 bytes, device ids: kernel on 12 SMs -> kernel 55 GB/s on 8 SMs"
    ]
    assert autotune_copies.changes(rates, after, after) == []


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["load", "store", "device"])
def test_all_implementations_are_measured_on_gpu(direction):
    candidates = (Candidate("dma", 0), Candidate("kernel", 4), Candidate("pallas", 4))
    measured = autotune_copies.measure(Cell(direction, 8192, 64, candidates))
    assert [c[:2] for c in measured] == [c[:2] for c in candidates]
