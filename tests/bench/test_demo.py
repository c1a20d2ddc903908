"""`bench.serving.demo`: records of the serving example's runs."""

import json

import pytest

from bench.harness import records
from bench.harness.records import Results, Row
from bench.report.catalog import TABLES
from bench.serving import demo

pytestmark = pytest.mark.host_only


def demo_summary(answers, on_host=16):
    """Output of the serving example, as far as bench.serving.demo reads it."""
    row = {"turn": 1, "recomputed": 0, "on host": on_host, "stored MiB": 2.0, "loaded MiB": 1.0}
    rounds = {
        name: [row | {"TTFT ms": 10.0 + i, "tokens/s": 100.0 - i}] for i, name in enumerate(answers)
    }
    compared = [{"run": name} | rows[0] for name, rows in rounds.items()]
    turns = [{"run": name, "tokens": tokens} for name, runs in answers.items() for tokens in runs]
    return {"rounds": rounds, "compared": compared, "turns": turns}


def recorded_demo(summary):
    found = Results("demo")
    demo.record(found, summary)
    return found


def test_demo_record_has_the_other_runs_as_baselines():
    answers = {"offload": [[1, 2]], "recompute": [[1, 2]], "all in HBM": [[1, 2]]}
    found = recorded_demo(demo_summary(answers))
    baselines = {"recompute": 11.0, "all in HBM": 12.0}
    assert Row("turn 1", "time to first token", "ms", 10.0, None, baselines) in found.rows
    assert Row("turn 1", "loaded from host memory", "MiB", 1.0) in found.rows
    assert all(target.met for target in found.checks)


@pytest.mark.parametrize(
    ("other", "unequal"),
    [
        ([[1, 2], [3]], 0),
        ([[1, 9], [3]], 1),
        ([[1, 2], []], 1),
        ([[9, 9], [3, 4]], 3),
    ],
)
def test_demo_target_counts_unequal_tokens(other, unequal):
    found = recorded_demo(demo_summary({"offload": [[1, 2], [3]], "recompute": other}))
    assert found.checks[0].name == "tokens equal to run 'recompute'"
    assert (found.checks[0].got, found.checks[0].met) == (unequal, unequal == 0)


def test_demo_run_without_an_answer_of_the_other_raises():
    for answers in ([[1], [2]], [[1]]), ([[1]], [[1], [2]]):
        with pytest.raises(ValueError, match="argument 2 is"):
            recorded_demo(demo_summary(dict(zip(("offload", "recompute"), answers, strict=True))))


@pytest.mark.parametrize(("other", "code", "want"), [([[1]], 0, 0), ([[2]], 0, 1), ([[1]], 2, 2)])
def test_demo_fails_with_its_example_and_its_checks(other, code, want, monkeypatch):
    summary = demo_summary({"offload": [[1]], "recompute": other})
    monkeypatch.setattr(demo, "serve", lambda flags: (summary, code))
    monkeypatch.setattr(Results, "save", lambda *_: None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # main sets it if it is unset
    assert demo.main([]) == want


def test_demo_without_pages_from_host_memory_misses_its_target():
    found = recorded_demo(demo_summary({"offload": [[1]], "recompute": [[1]]}, on_host=0))
    assert [target.met for target in found.checks] == [True, False]


@pytest.mark.cpu_only
def test_demo_run_of_the_example_is_recorded(tmp_path):
    conversations = [{"id": name, "turns": ["How are you?", "And now?"]} for name in "abc"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, conversations)))
    summary, code = demo.serve(["--prompts", str(prompts), "--max-new-tokens", "2"])
    found = recorded_demo(summary)
    assert code == 0
    assert {row.case for row in found.rows} == {"turn 1", "turn 2", demo.LATER_TURNS}
    same = [target for target in found.checks if target.name.startswith("tokens equal")]
    assert len(same) == 2 and all(target.met for target in same)


def test_demo_table_has_one_row_per_device(tmp_path):
    found = recorded_demo(demo_summary({"offload": [[1, 2]], "recompute": [[1, 3]]}))
    found.save(root=tmp_path)
    files = records.read(tmp_path)
    header, _, line = TABLES["demo"](files).splitlines()
    assert header.startswith("| device | time to first token, ms (offload / recompute) | ")
    assert line == f"| {files[0].device} | 10 / 11 | 100 / 99 | 0 / 0 | 2 | 1 | 1 |"
