"""`bench.checks.memcheck`: the record of a run under compute-sanitizer."""

import pytest

from bench.checks import memcheck
from bench.harness.records import Results

pytestmark = pytest.mark.host_only

CLEAN = "========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("output", "exit_code", "missed"),
    [
        (f"= 9 passed, 2 deselected =\n{CLEAN}", 0, []),
        (f"= 9 passed =\n{CLEAN.replace('0 errors', '1 error')}", 0, ["memory errors"]),
        (f"= 1 failed, 9 passed =\n{CLEAN}", 1, ["failed tests", "exit code"]),
        (f"= 5 passed, 2 errors in 3.1s =\n{CLEAN}", 1, ["failed tests", "exit code"]),
        (f"= 5 passed, 1 error in 3.1s =\n{CLEAN}", 0, ["failed tests"]),
        (f"= 9 passed =\n{CLEAN}", 3, ["exit code"]),
        (f"= 9 deselected =\n{CLEAN}", 5, ["passed tests", "exit code"]),
        ("= 9 passed =\n", 0, ["memory errors"]),
        ("", 0, ["memory errors", "passed tests"]),
    ],
)
def test_checks_are_met_by_a_clean_run_only(output, exit_code, missed):
    results = Results("memcheck")
    memcheck.record(results, output, exit_code)
    assert results.exit_code == bool(missed)
    found = [check.name.partition(" in ")[0] for check in results.checks if not check.met]
    assert found == missed


def test_outcomes_are_those_of_the_summary():
    lines = (
        "= test session starts =",
        "9 failed",
        "= 1 failed, 5 passed, 2 errors in 3.1s =",
        CLEAN,
    )
    assert memcheck.outcomes("\n".join(lines)) == {"passed": 5, "failed": 3}
