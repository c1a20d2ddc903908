"""`copy_table`: validation and lookup of files, and rules derived from measurements."""

import json
import math
import os
import pathlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxkv._src.autotune.rules import SAME_RATE, SCENARIOS, pick, rank, rules_of
from jaxkv._src.tuning import copy_lookup, copy_table, table_files
from jaxkv._src.tuning.copy_table import SMALLEST, Candidate, CopySize, Rule

pytestmark = pytest.mark.host_only

H200 = "NVIDIA H200"
PACKAGED = sorted(copy_table.PACKAGED.glob("*.json"))


def content_of_default() -> dict:
    return json.loads((copy_table.PACKAGED / table_files.DEFAULT).read_text())


def write(folder: pathlib.Path, content, name: str = "table.json") -> pathlib.Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# ---------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.name)
def test_packaged_tables_round_trip(path):
    table = copy_table.load(path)
    assert table.to_text() == path.read_text()
    assert path.name in (f"{table_files.slug(table.device_kind)}.json", table_files.DEFAULT)


def test_measured_size_of_a_rule_is_optional(tmp_path):
    with_size = copy_table.load(write(tmp_path, changed([*RULE, MEASURED], [16, 2048, 1 << 20])))
    without, given = with_size.rules["load"][:2]
    assert (without.measured, given.measured) == (None, CopySize(16, 2048, 1 << 20))
    assert copy_table.load(write(tmp_path, with_size.to_text())) == with_size


def changed(path: list, value) -> dict:
    """The default table's content with one entry replaced, or removed if `value` is `...`."""
    content = content_of_default()
    *outer, last = path
    entry = content
    for key in outer:
        entry = entry[key]
    if value is ...:
        del entry[last]
    else:
        entry[last] = value
    return content


def hardware(**changes) -> dict:
    """The default table's content with the hardware of an H200, changed."""
    return changed(["hardware"], {**copy_lookup.packaged_table(H200).head["hardware"], **changes})


RULE = ["rules", "load", 1]
FIRST = [*RULE, "candidates", 0]
MEASURED = "measured_size"


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "Expecting property name"),
        ([], r"the file must be an object, got \[\]"),
        (changed(["date"], ...), "the file: missing keys date"),
        (changed(["hardware"], {}), "hardware: missing keys compute_capability, num_sms"),
        (hardware(compute_capability="9"), r'hardware.compute_capability must be .*"9.0", got'),
        (hardware(num_sms=0), r"hardware.num_sms must be an integer in \[1, 4096\], got 0"),
        (hardware(pcie_generation=9), r"hardware.pcie_generation must be .* \[1, 6\], got 9"),
        (hardware(pcie_lanes=None), r"hardware.pcie_lanes must be an integer in \[1, 32\]"),
        ({**content_of_default(), "dates": 1}, "the file: unknown keys dates"),
        (changed(["device_kind"], None), "device_kind must be str, got None"),
        (changed(["commit"], 7), "commit must be str or NoneType, got 7"),
        (changed(["rules", "store"], ...), "rules: missing keys store"),
        (
            changed(["rules", "load"], []),
            r"rules.load must be a list of at least one rule, got \[\]",
        ),
        (changed([*RULE[:2], 0, "min_run_bytes"], 2), r"rules.load\[0\] must apply to every copy"),
        (changed([*RULE, "min_run_bytes"], 1), r"rules.load\[1\] must precede rules.load\[0\]"),
        (
            changed([*RULE, "min_run_bytes"], "1"),
            r"rules.load\[1\].min_run_bytes.* in \[1, .*got '1'",
        ),
        (changed([*RULE, "min_total_bytes"], -1), r"\[1\].min_total_bytes.* in \[0, .*got -1"),
        (changed([*RULE, "min_word_bytes"], True), r"\[1\].min_word_bytes.*got True"),
        (changed([*RULE, "candidates"], []), r"\[1\].candidates must be a list of at least one"),
        (changed(FIRST, ["dma", 0]), r"candidates\[0\] must be \[implementation, num_sms, gb_per"),
        (changed(FIRST, ["cpu", 0, 1]), "one of dma, kernel, pallas, host, xla, got 'cpu'"),
        (changed(FIRST, ["dma", 1, 1]), "num_sms of dma must be 0, got 1"),
        (
            changed(FIRST, ["kernel", 0, 1]),
            r"num_sms of kernel must be an integer in \[1, 4096\], got 0",
        ),
        (changed(FIRST, ["kernel", 2**32, 1]), "num_sms of kernel .*4294967296"),
        (changed(FIRST, ["kernel", 10**30, 1]), "num_sms of kernel .*got 1000000"),
        (changed(FIRST, ["dma", False, 1]), "num_sms of dma must be 0, got False"),
        (
            changed(FIRST, ["dma", 0, 0]),
            r"gb_per_s, if not null, must be a number in \(0, 1000000\]",
        ),
        (changed(FIRST, ["dma", 0, math.inf]), "gb_per_s.* got inf"),
        (changed(FIRST, ["dma", 0, math.nan]), "gb_per_s.* got nan"),
        (changed(FIRST, ["dma", 0, 10**400]), "gb_per_s.* got 1000"),
        (changed([*RULE, "min_total_bytes"], 2**64), r"min_total_bytes.*got 18446744073709551616"),
        (changed(["peak_gb_per_s"], {"load": "fast"}), "peak_gb_per_s.load .*got 'fast'"),
        (
            changed([*RULE, MEASURED], [16, 512]),
            r"\[1\].measured_size must be \[word_bytes, run_bytes, total_bytes\], got \[16, 512\]",
        ),
        (changed([*RULE, MEASURED], [16, 0, 9]), r"\[1\].measured_size: run_bytes must .*got 0"),
        ("[" * 100_000, "recursion"),
        (" " * 2**21, "2097152 bytes exceed the limit of 1048576 bytes"),
        (
            changed(FIRST, ["kernel", 4, 1]),
            r"duplicate .* \['kernel', 'kernel', 'pallas', 'host', 'xla'\]",
        ),
    ],
)
def test_invalid_tables_are_rejected(content, message, tmp_path):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as raised:
        copy_table.load(path)
    assert str(path) in str(raised.value)


def test_fifo_is_rejected(tmp_path):
    path = tmp_path / "table.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="must be a regular file"):
        copy_table.load(path)


def test_slug():
    assert table_files.slug("NVIDIA H200 NVL (MIG 1g.18gb)") == "nvidia_h200_nvl_mig_1g_18gb"


# ---------------------------------------------------------------------------------------------
# Rules


def test_last_matching_rule_applies():
    rules = [
        Rule(CopySize(*minima), (Candidate("host", 0),))
        for minima in [(1, 1, 0), (1, 8192, 0), (16, 1, 0), (16, 8192, 65536)]
    ]
    for size, index in {
        (1, 1, 0): 0,
        (8, 8191, 1 << 30): 0,
        (8, 8192, 8192): 1,
        (16, 1, 1): 2,
        (16, 8192, 65535): 2,
        (16, 8191, 1 << 30): 2,
        (16, 8192, 65536): 3,
    }.items():
        assert copy_table.last_matching_rule(rules, CopySize(*size)) is rules[index], size


def test_fewest_sms_are_selected_at_equal_rates():
    kernel = [Candidate("kernel", sms, rate) for sms, rate in [(4, 49.9), (12, 50.7), (24, 50.8)]]
    pallas = [Candidate("pallas", sms, rate) for sms, rate in [(2, 48.0), (4, 50.0)]]
    dma = Candidate("dma", 0, 26.2)
    assert pick(kernel) == kernel[0]
    assert pick(pallas) == pallas[1]
    assert pick([*kernel, Candidate("pallas", 2, 49.9), dma]) == Candidate("pallas", 2, 49.9)
    assert rank([dma, *kernel, *pallas]) == (pallas[1], kernel[0], dma)
    assert pick([*kernel, Candidate("dma", 0, 49.9)]).implementation == "dma"


def test_rule_has_rates_of_its_largest_size():
    sizes = [CopySize(16, 512, n * 512) for n in (1, 16, 256)]
    rates = [(size, [Candidate("host", 0, float(i + 1))]) for i, size in enumerate(sizes)]
    assert rules_of(rates) == (Rule(SMALLEST, (Candidate("host", 0, 3.0),), sizes[-1]),)


def test_rates_of_a_rule_are_all_of_the_same_size():
    small, large = (CopySize(16, 512, n * 512) for n in (1, 16))
    both = [Candidate("dma", 0, 40.0), Candidate("kernel", 4, 30.0)]
    rates = [(small, both), (large, [Candidate("dma", 0, 50.0)])]
    assert rules_of(rates) == (Rule(SMALLEST, tuple(both), small),)


@st.composite
def measurements(draw):
    """Rates of some candidates, for sizes of two alignments."""
    kinds = [("dma", 0), ("kernel", 4), ("kernel", 12), ("pallas", 2), ("pallas", 8)]
    sizes = draw(
        st.sets(
            st.builds(
                lambda word, run, count: CopySize(word, run * 16, run * 16 * count),
                st.sampled_from([2, 16]),
                st.integers(1, 4),
                st.integers(1, 3),
            ),
            min_size=1,
            max_size=8,
        )
    )
    rate = st.sampled_from([1.0, 10.0, 48.0, 49.0, 50.0])
    found = []
    for size in sizes:
        chosen = draw(st.sets(st.sampled_from(kinds[:3] if size.word_bytes < 16 else kinds)))
        chosen.add(("kernel", 12))
        found.append((size, [Candidate(name, sms, draw(rate)) for name, sms in sorted(chosen)]))
    return found


# No single list can order the kernel before dma with pallas present and after it without.
@example(
    [
        (
            CopySize(16, 16, 16),
            [
                Candidate("dma", 0, 48.0),
                Candidate("kernel", 4, 49.0),
                Candidate("pallas", 8, 50.0),
            ],
        )
    ]
)
@given(measurements())
def test_rules_are_optimal_at_every_measured_size(rates):
    rules = rules_of(rates)
    assert rules[0].minima == SMALLEST
    assert [rule.minima for rule in rules] == sorted({rule.minima for rule in rules})
    for size, measured in rates:
        listed = copy_table.last_matching_rule(rules, size).candidates
        for unsupported in SCENARIOS:
            possible = {c[:2]: c for c in measured if c.implementation not in unsupported}
            taken = next(c for c in listed if c.implementation not in unsupported)
            here = possible[taken[:2]]
            assert here.gb_per_s >= (1 - SAME_RATE) * max(c.gb_per_s for c in possible.values())
            as_fast = [c for c in possible.values() if c.gb_per_s >= here.gb_per_s]
            assert here.num_sms == min(c.num_sms for c in as_fast)
        assert listed[0].num_sms <= pick(measured).num_sms
