import itertools
import pathlib
from typing import Any

import jax
import pytest

from jaxkv._src.autotune import all_reduce, copies, measurement
from jaxkv._src.tuning import all_reduce_table, copy_lookup, copy_table, table_files


class State:
    """Counts the steps between host syncs."""

    def __init__(self):
        self.steps, self.synced = 0, []

    def step(self):
        self.steps += 1
        return self

    def block_until_ready(self):
        self.synced.append(self.steps)
        self.steps = 0


@pytest.mark.parametrize(
    "seconds, syncs", [(0.004, [1, 1, 5, 5, 5]), (1.0, [1, 1, 1])], ids=["chains", "long"]
)
def test_steps_between_host_syncs(monkeypatch, seconds, syncs):
    """Two warm-ups, then chains of 20 ms, or one step that takes many times as long."""
    state, clock = State(), itertools.count(step=seconds)
    seconds_per_step: Any = measurement.seconds_per_step
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: next(clock))
    _, last = seconds_per_step(State.step, state, seconds_of_sample=0.02, samples=3)
    assert last is state and state.synced == syncs


COPIES, ALL_REDUCES = (next(one.PACKAGED.glob("*.json")) for one in (copy_lookup, all_reduce_table))


@pytest.mark.parametrize("flags", [[], ["--all-reduce"]], ids=["copies", "all-reduces"])
@pytest.mark.parametrize("content", ["the other table", "[1, 2", "{}"])
def test_another_file_is_not_replaced(monkeypatch, tmp_path, flags, content):
    """Nor is anything measured. In a folder, both tables have the same name."""
    for module in (all_reduce, copies):
        monkeypatch.setattr(module, "cells", lambda *_, **__: pytest.fail("it was measured"))
    if content == "the other table":
        content = (COPIES if flags else ALL_REDUCES).read_text()
    path = tmp_path / f"{table_files.slug(jax.local_devices()[0].device_kind)}.json"
    path.write_text(content)
    kind = "all-reduces" if flags else "page copies"
    with pytest.raises(FileExistsError, match=rf"{path} exists and is not a valid .* {kind} \("):
        copies.main([*flags, "--out", str(tmp_path)])
    assert path.read_text() == content


@pytest.mark.parametrize("content", [None, "", "the same table"])
def test_tables_of_the_same_kind_are_replaceable(tmp_path, content):
    for load, packaged in ((copy_table.load, COPIES), (all_reduce_table.load, ALL_REDUCES)):
        path = tmp_path / packaged.name
        if content is not None:
            path.write_text(content and packaged.read_text())
        measurement.check_replaceable(path, load, "these")


def test_a_table_is_replaced_at_once(monkeypatch, tmp_path):
    path, link = tmp_path / "cpu.json", tmp_path / "link.json"
    link.symlink_to(path)
    measurement.write(path, "first")
    path.chmod(0o640)
    with path.open() as reader:
        measurement.write(link, "second")
        assert (reader.read(), path.read_text()) == ("first", "second")
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640

    def interrupted(path, text):
        with path.open("w") as file:
            file.write(text[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measurement.write(path, "third")
    assert path.read_text() == "second" and {*tmp_path.iterdir()} == {path, link}
