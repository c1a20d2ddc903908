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
from jaxkv._src.autotune.pools import Pools
from jaxkv._src.transfer import dispatch
from jaxkv._src.tuning import copy_lookup, copy_table
from jaxkv._src.tuning.copy_table import Candidate, CopySize, Implementation

HOST = (Candidate("host", 0),)


@pytest.fixture(scope="module")
def pools():
    return Pools(8 << 20)


@pytest.mark.cpu_only
def test_command_writes_valid_table(tmp_path):
    out = tmp_path  # a folder
    command = [sys.executable, "-m", "jaxkv.tune", "--quick", "--out", str(out)]
    output = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "JAXKV_COMMIT": "c0ffee" * 7, "JAX_PLATFORMS": "cpu"},
    ).stdout
    table = copy_table.load(out / "cpu.json")
    assert (table.device_kind, table.hardware) == ("cpu", None)
    assert table.how == "python -m jaxkv.tune --quick, arrays of 0.00195 GiB"
    assert table.source == "cpu.json (commit c0ffeec0f)"
    assert table.date and table.versions["jax"] == jax.__version__
    assert {*table.peak_gb_per_s} == {"load", "store", "device"}
    for direction in ("load", "store", "device"):
        [rule] = table.rules[direction]
        [candidate] = rule.candidates
        assert candidate.implementation == "host" and candidate.gb_per_s
        assert rule.measured == CopySize(16, 4096, 16 * 4096)
    default = copy_lookup.default_table()
    assert isinstance(default, copy_table.Table)
    assert table.rules["overlapped"] == default.rules["overlapped"]
    assert (out / "cpu.json").read_text() in output
    assert "choices that differ from default.json" in output


def test_missing_folder_is_an_error_before_the_measurement(monkeypatch, tmp_path):
    monkeypatch.setattr(autotune_copies, "measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(FileNotFoundError, match=r"--out .*none/cpu.json: there is no folder"):
        autotune_copies.main(["--out", str(tmp_path / "none/cpu.json")])


@pytest.mark.cpu_only
@pytest.mark.parametrize("direction", ["load", "store", "device"])
@pytest.mark.parametrize("run_bytes", [2, 513, 4096])
def test_rate_is_measured_after_verification(pools, direction, run_bytes):
    [measured] = autotune_copies.measure(Cell(direction, run_bytes, 20, HOST), pools)
    assert measured.implementation == "host" and measured.gb_per_s


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "direction, program_bytes, copies",
    [
        ("load", 99 * 320, autotune_copies.MOST_COPIES),
        ("load", 2 * 320, 2),
        ("load", 319, 1),
        ("device", 320, autotune_copies.MOST_COPIES),
    ],
    ids=["short", "longer", "long", "within the device"],
)
def test_rate_counts_all_payload_bytes(monkeypatch, pools, direction, program_bytes, copies):
    timed = []

    def seconds(step, array, **_):
        timed.append(str(jax.make_jaxpr(step)(array)).count("name=copy"))
        return 2.0, array

    monkeypatch.setattr(measurement, "seconds_per_step", seconds)
    monkeypatch.setattr(autotune_copies, "PROGRAM_BYTES", program_bytes)
    cell = Cell(direction, 64, 5, HOST)
    rate = autotune_copies._rate_function(autotune_copies._Blocks(cell, pools), *HOST)()
    assert timed == [copies]
    assert rate == pytest.approx(copies * 5 * 64 / 2.0 / 1e9)


@pytest.mark.cpu_only
def test_unsupported_candidates_are_skipped(pools):
    candidates = (Candidate("dma", 0), Candidate("kernel", 4), Candidate("pallas", 4), *HOST)
    [measured] = autotune_copies.measure(Cell("load", 64, 5, candidates), pools)
    assert measured.implementation == "host"


@pytest.mark.cpu_only
@pytest.mark.parametrize("where", ["moved", "neighbour"])
@pytest.mark.parametrize("direction", ["load", "store", "device"])
def test_incorrect_destination_raises(monkeypatch, pools, where, direction):
    swap_blocks = autotune_copies.jaxkv.swap_blocks

    def wrong(source, destination, source_ids, destination_ids):
        out = swap_blocks(source, destination, source_ids, destination_ids)
        return out.at[blocks.ids[-1][1][3] + (where == "neighbour"), 0].add(1)

    cell = Cell(direction, 64, 5, HOST)
    blocks = autotune_copies._Blocks(cell, pools)
    monkeypatch.setattr(autotune_copies.jaxkv, "swap_blocks", wrong)
    monkeypatch.setattr(measurement, "seconds_per_step", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(RuntimeError, match=rf"{direction}, 5 x 64 bytes: incorrect .* of host"):
        autotune_copies._rate_function(blocks, *HOST)


@pytest.mark.parametrize("direction", ["load", "device"])
@pytest.mark.parametrize(
    "num_ids, copies", [(5, autotune_copies.MOST_COPIES), (5000, 13), (65536, 1)]
)
def test_copies_of_a_program_are_of_different_blocks(pools, direction, num_ids, copies):
    """As many as the arrays have: 65,536 blocks of 128 bytes, or half of them on the device."""
    num_ids, copies = (num_ids, copies) if direction == "load" else (num_ids // 2, copies)
    blocks = autotune_copies._Blocks(Cell(direction, 128, num_ids, HOST), pools)
    assert len(blocks.ids) == copies
    for side in zip(*blocks.ids, strict=True):
        assert len(np.unique(np.concatenate(side))) == copies * num_ids


def test_all_sm_counts_are_measured(monkeypatch, pools):
    """A rate that grows by 2 % with each count is 8 % lower on the first than on the last."""
    rates = {1: 50.0, 2: 51.0, 4: 52.0, 8: 53.0, 12: 54.0}
    monkeypatch.setattr(
        autotune_copies, "_rate_function", lambda _, candidate: lambda: rates[candidate.num_sms]
    )
    candidates = tuple(Candidate("kernel", sms) for sms in rates)
    measured = autotune_copies.measure(Cell("load", 64, 5, candidates), pools)
    assert {candidate.num_sms: candidate.gb_per_s for candidate in measured} == rates


def test_rate_is_that_of_the_faster_pass(monkeypatch, pools):
    """What else the host does slows down the first pass of one candidate, the second of another."""
    rates = {2: iter([20.0, 50.0]), 4: iter([51.0, 30.0])}
    order = []

    def rate_function(_, candidate):
        def rate():
            order.append(candidate.num_sms)
            return next(rates[candidate.num_sms])

        return rate

    monkeypatch.setattr(autotune_copies, "_rate_function", rate_function)
    candidates = tuple(Candidate("kernel", sms) for sms in rates)
    measured = autotune_copies.measure(Cell("load", 64, 5, candidates), pools)
    assert [candidate.gb_per_s for candidate in measured] == [50.0, 51.0]
    assert order == [2, 4, 2, 4]


def test_each_candidate_is_forced(monkeypatch, pools):
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
    autotune_copies.measure(Cell("load", 128, 5, tuple(Candidate(*name) for name in names)), pools)
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
        kilobyte = [c for c in cells if c.direction == direction and c.run_bytes == 1024]
        assert quick or Candidate("kernel", 12) in max(kilobyte).candidates
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
def test_all_implementations_are_measured_on_gpu(pools, direction):
    candidates = (Candidate("dma", 0), Candidate("kernel", 4), Candidate("pallas", 4))
    measured = autotune_copies.measure(Cell(direction, 8192, 64, candidates), pools)
    assert [c[:2] for c in measured] == [c[:2] for c in candidates]
