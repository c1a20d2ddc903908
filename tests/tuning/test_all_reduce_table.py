"""`all_reduce_table`: validation of files, and precedence of the last applicable rule."""

import json

import pytest

from jaxkv._src.tuning import table_files
from jaxkv._src.tuning.all_reduce_table import PACKAGED, WORLD_SIZES, load, table_for

pytestmark = pytest.mark.host_only


def content_of_default() -> dict:
    return json.loads((PACKAGED / table_files.DEFAULT).read_text())


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.json")), ids=lambda path: path.name)
def test_packaged_tables_are_valid(path):
    table = load(path)
    assert {*table.rules} == {*WORLD_SIZES}
    assert path.name in (f"{table_files.slug(table.device_kind)}.json", table_files.DEFAULT)


def test_unknown_device_kind_uses_default():
    assert table_for("Some GPU").device_kind == table_files.ANY_DEVICE


def test_last_matching_rule_applies(tmp_path):
    rules = [[0, "one_shot"], [100, "two_shot"], [5000, "psum"]]
    content = content_of_default()
    content["rules"]["6"] = rules
    (tmp_path / "table.json").write_text(json.dumps(content))
    table = load(tmp_path / "table.json")
    for num_bytes, algorithm in [
        (0, "one_shot"),
        (99, "one_shot"),
        (100, "two_shot"),
        (4999, "two_shot"),
        (5000, "psum"),
        (1 << 40, "psum"),
    ]:
        assert table.algorithm(6, num_bytes) == algorithm


def with_rules(rules) -> dict:
    content = content_of_default()
    content["rules"]["2"] = rules
    return content


@pytest.mark.parametrize(
    "content, message",
    [
        ([], "the file must be an object of device_kind, how, commit, date, versions and rules"),
        ({**content_of_default(), "rules": {}}, r"rules must have the keys \(2, 4, 6, 8\)"),
        (with_rules({}), r"rules.2 must be a list of \[min_bytes, algorithm\], got \{\}"),
        (with_rules([]), r"rules.2: min_bytes must ascend from 0, got \[\]"),
        (with_rules([[1, "psum"]]), r"rules.2: min_bytes must ascend from 0, got \[1\]"),
        (with_rules([[0, "psum"], [0, "psum"]]), r"must ascend from 0, got \[0, 0\]"),
        (with_rules([[0, "psum"], [2**64, "psum"]]), r"min_bytes .*got 18446744073709551616"),
        (with_rules([[0, "nccl"]]), "one of low_latency, one_shot, two_shot, psum, got 'nccl'"),
        (with_rules([[0, "multimem"]]), "two_shot, psum, got 'multimem'"),
    ],
)
def test_invalid_tables_are_rejected(content, message, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)
