"""`copy_lookup`: selection of a table, and rules for GPUs without one."""

import dataclasses
import json
import pathlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxkv._src.runtime.pcie import LANE_MB_PER_S
from jaxkv._src.tuning import copy_lookup, copy_table, table_files
from jaxkv._src.tuning.copy_lookup import DerivedTable, nearest
from jaxkv._src.tuning.copy_table import COPY_KINDS, SMALLEST, Candidate, CopySize, Rule
from jaxkv._src.tuning.hardware import Hardware

pytestmark = pytest.mark.host_only

HOPPER = Hardware("9.0", 132, 5, 16)
AMPERE = Hardware("8.0", 108, 4, 16)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(copy_lookup.VARIABLE, raising=False)


def content_of_default() -> dict:
    return json.loads((copy_table.PACKAGED / table_files.DEFAULT).read_text())


def write(folder: pathlib.Path, content: dict) -> pathlib.Path:
    path = folder / "table.json"
    path.write_text(json.dumps(content))
    return path


# ---------------------------------------------------------------------------------------------
# Selection


def test_default_table_has_all_implementations():
    """It is the fallback for implementations missing in another table."""
    for copy_kind, rules in copy_lookup.default_table().rules.items():
        expected = {*copy_table.IMPLEMENTATIONS} - (
            {"pallas"} if copy_kind == "overlapped" else set()
        )
        for rule in rules:
            assert {candidate.implementation for candidate in rule.candidates} == expected


@pytest.mark.parametrize("hardware", [None, AMPERE])
def test_packaged_table_is_selected_by_device_kind(hardware):
    assert copy_lookup.table_for("NVIDIA H200", hardware).head["name"] == "nvidia_h200.json"
    assert copy_lookup.is_packaged("NVIDIA H200") and not copy_lookup.is_packaged("Some GPU")


def test_every_table_of_a_gpu_names_its_hardware():
    """Otherwise no rule can be derived from it."""
    for path in copy_table.PACKAGED.glob("*.json"):
        assert (copy_table.load(path).hardware is None) == (path.name == table_files.DEFAULT)


def test_device_that_is_no_cuda_gpu_uses_default():
    assert copy_lookup.table_for("cpu") is copy_lookup.default_table()


def test_gpu_of_unknown_kind_uses_the_nearest_tables():
    table = copy_lookup.table_for("NVIDIA A100", AMPERE)
    assert isinstance(table, DerivedTable) and table.hardware == AMPERE
    assert table is copy_lookup.table_for("NVIDIA A100", AMPERE)  # cached
    measured = [copy_table.load(path) for path in sorted(copy_table.PACKAGED.glob("nvidia*.json"))]
    assert table.tables == nearest(measured, AMPERE)
    text = table.source
    assert "nvidia_h200.json (commit" in text
    assert text.endswith("for compute capability 8.0, PCIe 4 x16")
    unknown = copy_lookup.table_for("NVIDIA A100", Hardware("8.0", 108))
    assert unknown.source.endswith("compute capability 8.0, unknown PCIe link, taken for equal")


def test_environment_variable_selects_table(monkeypatch, tmp_path):
    path = write(
        tmp_path, {**content_of_default(), "device_kind": "Some GPU", "commit": "0123456789"}
    )
    monkeypatch.setenv(copy_lookup.VARIABLE, str(path))
    table = copy_lookup.table_for("Some GPU", HOPPER)
    assert (table.head["name"], table.source) == ("table.json", "table.json (commit 012345678)")
    monkeypatch.delenv(copy_lookup.VARIABLE)
    assert isinstance(copy_lookup.table_for("Some GPU", HOPPER), DerivedTable)


def test_table_of_different_device_kind_raises(monkeypatch, tmp_path):
    path = write(tmp_path, {**content_of_default(), "device_kind": "NVIDIA H200"})
    monkeypatch.setenv(copy_lookup.VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"JAXKV_TUNING=.*'NVIDIA H200'.*'cpu'"):
        copy_lookup.table_for("cpu")


def test_missing_table_raises(monkeypatch, tmp_path):
    monkeypatch.setenv(copy_lookup.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        copy_lookup.table_for("cpu")


# ---------------------------------------------------------------------------------------------
# Derived rules


def table_of(hardware: Hardware | None, *rules: Rule, name: str = "a.json") -> copy_table.Table:
    """A table with these rules for every kind of copy."""
    return dataclasses.replace(
        copy_lookup.default_table(),
        name=name,
        hardware=hardware,
        rules=dict.fromkeys(COPY_KINDS, rules),
    )


def rule(run_bytes: int, *candidates: tuple, total_bytes: int = 0) -> Rule:
    return Rule(CopySize(1, run_bytes, total_bytes), tuple(Candidate(*c) for c in candidates))


def derived(hardware: Hardware, *tables: copy_table.Table) -> DerivedTable:
    return DerivedTable(tables, hardware)


def test_nearest_tables_by_compute_capability_then_generation():
    hopper4, hopper5, ampere4, none = (
        table_of(hardware) for hardware in (Hardware("9.0", 132, 4, 16), HOPPER, AMPERE, None)
    )
    tables = hopper4, hopper5, ampere4, none
    assert nearest(tables, HOPPER) == (hopper5,)
    assert nearest(tables, Hardware("9.0", 78, 5, 8)) == (hopper5,)
    assert nearest(tables, Hardware("9.0", 132, 6, 16)) == (hopper4, hopper5)
    assert nearest(tables, Hardware("8.6", 84, 5, 16)) == (ampere4,)
    assert nearest(tables, Hardware("10.0", 148, 4, 16)) == (hopper4, ampere4)
    assert nearest((none,), HOPPER) == ()


def test_equal_hardware_keeps_choices_without_rates():
    rules = rule(1, ("kernel", 12, 40.0), ("dma", 0, 2.0)), rule(4096, ("dma", 0, 54.0))
    table = derived(HOPPER, table_of(HOPPER, *rules))
    assert table.rule("load", CopySize(16, 4095, 9)) == rule(1, ("kernel", 12), ("dma", 0))
    assert table.rule("load", CopySize(16, 4096, 9)) == rule(4096, ("dma", 0))


@pytest.mark.parametrize(
    "link, factor", [((4, 16), 0.5), ((5, 8), 0.5), ((5, 32), 2.0), ((None, None), 1.0)]
)
def test_sizes_and_sms_scale_with_the_link(link, factor):
    rules = rule(1, ("kernel", 12)), rule(4096, ("dma", 0), ("kernel", 3), total_bytes=1 << 20)
    table = derived(Hardware("9.0", 132, *link), table_of(HOPPER, *rules))
    run, total = int(4096 * factor), int((1 << 20) * factor)
    found = table.rule("store", CopySize(1, run, total))
    sms = {0.5: 2, 1.0: 3, 2.0: 6}[factor]  # at least as many: 1.5 rounds up
    assert found == rule(run, ("dma", 0), ("kernel", sms), total_bytes=total)
    for smaller in (CopySize(1, run - 1, total), CopySize(1, run, total - 1)):
        assert table.rule("store", smaller) == rule(1, ("kernel", int(12 * factor)))


def test_copies_within_the_device_scale_with_its_sms():
    rules = rule(1, ("kernel", 33)), rule(4096, ("kernel", 132))
    table = derived(Hardware("9.0", 78, 4, 16), table_of(HOPPER, *rules))
    assert table.rule("device", CopySize(1, 4095, 0)) == rule(1, ("kernel", 20))
    assert table.rule("device", CopySize(1, 4096, 0)) == rule(4096, ("kernel", 78))


def test_sms_never_exceed_those_of_the_gpu():
    table = derived(Hardware("9.0", 14, 6, 16), table_of(HOPPER, rule(1, ("kernel", 12))))
    assert table.rule("load", SMALLEST) == rule(1, ("kernel", 14))


def test_pallas_is_kept_for_the_same_major_compute_capability_only():
    table = table_of(HOPPER, rule(1, ("pallas", 4), ("kernel", 12)))
    assert derived(Hardware("9.3", 132, 5, 16), table).rule("load", SMALLEST) == table.rule(
        "load", SMALLEST
    )
    assert derived(AMPERE, table).rule("load", SMALLEST) == rule(1, ("kernel", 6))


@pytest.mark.parametrize(
    "one, other, expected",
    [
        # dma loses 10 % in one table, kernel 4 % in the other.
        ([("dma", 0, 50.0), ("kernel", 2, 48.0)], [("kernel", 4, 50.0), ("dma", 0, 45.0)],
         [("kernel", 4), ("dma", 0)]),
        ([("dma", 0, 50.0), ("kernel", 2, 44.0)], [("kernel", 4, 50.0), ("dma", 0, 45.0)],
         [("dma", 0), ("kernel", 4)]),
        # The choice of both, although another is faster on more SMs.
        ([("kernel", 2, 50.0), ("pallas", 12, 51.0)], [("kernel", 4, 50.0), ("pallas", 2, 50.5)],
         [("kernel", 4), ("pallas", 12)]),
        # Missing in one table, or without a rate.
        ([("kernel", 2, 50.0), ("dma", 0, 49.9)], [("kernel", 2, 50.0)],
         [("kernel", 2), ("dma", 0)]),
        ([("kernel", 2, None), ("dma", 0, None)], [("kernel", 2, 50.0), ("dma", 0, 49.0)],
         [("kernel", 2), ("dma", 0)]),
    ],
)  # fmt: skip
def test_disagreement_is_settled_by_the_smallest_worst_loss(one, other, expected):
    tables = [table_of(HOPPER, rule(1, *candidates)) for candidates in (one, other)]
    for order in (tables, tables[::-1]):
        assert derived(HOPPER, *order).rule("load", SMALLEST) == rule(1, *expected)


def test_rule_combines_the_minima_of_both_tables():
    short = table_of(HOPPER, rule(1, ("kernel", 2)), rule(4096, ("dma", 0)))
    large = table_of(HOPPER, rule(1, ("kernel", 4)), rule(1, ("dma", 0), total_bytes=999))
    table = derived(HOPPER, short, large)
    assert table.rule("load", CopySize(8, 5000, 1000)) == rule(4096, ("dma", 0), total_bytes=999)


@given(
    st.builds(
        Hardware,
        st.sampled_from(["8.0", "8.9", "9.0", "10.0"]),
        st.integers(1, 200),
        st.sampled_from([*LANE_MB_PER_S]),
        st.sampled_from([1, 4, 8, 16]),
    ),
    st.sampled_from(COPY_KINDS),
    st.builds(CopySize, st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 1 << 21), st.integers(0)),
)
@example(Hardware("9.0", 132, 6, 16), "load", SMALLEST)
@example(Hardware("9.0", 132, 3, 8), "store", CopySize(16, 8192, 67108864))
def test_derived_rules_apply_to_every_copy(hardware, copy_kind, size):
    """The minima are reached, and a copy of just these has the same rule."""
    table = copy_lookup.packaged_table("Some GPU", hardware)
    found = table.rule(copy_kind, size)
    assert size.reaches(found.minima)
    assert table.rule(copy_kind, found.minima) == found
    names = [candidate.implementation for candidate in found.candidates]
    assert len({*names}) == len(names) > 0
    for candidate in found.candidates:
        on_sms = candidate.implementation in copy_table.ON_SMS
        assert 1 <= candidate.num_sms <= hardware.num_sms if on_sms else candidate.num_sms == 0
        assert candidate.gb_per_s is None
