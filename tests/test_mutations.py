"""The list of mutations fits the sources; `make mutants` applies them."""

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.host_only
if not (ROOT / "cuda").exists():
    pytest.skip("needs a checkout", allow_module_level=True)
MUTATIONS = tomllib.loads((ROOT / "tests/mutations.toml").read_text())["mutation"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["name"])
def test_mutation_applies_to_one_place(mutation):
    assert (ROOT / mutation["file"]).read_text().count(mutation["old"]) == 1
    assert mutation["old"] != mutation["new"]
    assert bool(mutation["tests"]) == mutation.get("compiles", True)
    for test in mutation["tests"]:
        assert (ROOT / test.partition("::")[0]).exists()


def test_reliability_page_names_mutations():
    rows = (ROOT / "docs/reliability.md").read_text().splitlines()
    named = [row.rsplit("|", 2)[1].strip() for row in rows if row.startswith("| ")]
    listed = {name.strip() for cell in named for name in cell.split(",")} - {"mutation", "-"}
    assert listed and listed <= {mutation["name"] for mutation in MUTATIONS}


def test_reliability_page_names_tests():
    named = re.findall(
        r"`(?:tests/)?(\w+/test_\w+\.py)`", (ROOT / "docs/reliability.md").read_text()
    )
    assert named and not [name for name in named if not (ROOT / "tests" / name).exists()]


def test_reliability_page_lists_the_survivors():
    page = (ROOT / "docs/reliability.md").read_text()
    survivors = [mutation for mutation in MUTATIONS if "survives" in mutation]
    assert page.count("\n- ") == len(survivors)
    for mutation in survivors:
        assert f"- {mutation['name']}: {mutation['survives']}." in page


def test_every_failure_mode_has_a_mutation():
    rows = (ROOT / "docs/reliability.md").read_text().splitlines()
    assert not [row for row in rows if row.startswith("| ") and row.endswith("| - |")]


def test_names_of_mutations_are_unique():
    names = [mutation["name"] for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
