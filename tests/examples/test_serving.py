"""The serving example: bookkeeping, and its answers with and without offload."""

import contextlib
import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from examples.serving import report
from examples.serving.block_manager import BlockManager, page_names
from examples.serving.engine import Engine, Limits, Turn, serve
from examples.serving.model import Config, init_params
from examples.serving.tokenizer import ByteTokenizer
from jaxkv._src.cache.host_layout import LAYOUTS

pytestmark = pytest.mark.end_to_end

CONFIG = Config(256, 64, 96, 2, 4, 2, 16)
LIMITS = Limits(page_size=8, batch=3, chunk=32, pages_per_turn=48, pages_in_use=80)
CONVERSATIONS = {
    name: [f"What is {name}, and since when?", f"Who told you that of {name}?", "Why?"]
    for name in ("rain", "a lighthouse", "the sea", "bread", "an owl", "winter")
}
NUM_TURNS = sum(map(len, CONVERSATIONS.values()))
NEW_TOKENS = 8
PLENTY = 300  # pages, for all conversations together


def make_engine(num_hbm_pages=LIMITS.pages_in_use, num_host_pages=0, **options):
    params = init_params(CONFIG, 0, "float32")
    return Engine(CONFIG, params, LIMITS, num_hbm_pages, num_host_pages, **options)


def served(engine, conversations=CONVERSATIONS):
    return serve(engine, ByteTokenizer(), conversations, NEW_TOKENS)


def answers(turns):
    return [turn.answer for turn in turns]


@pytest.fixture(scope="module")
def all_in_hbm():
    return served(make_engine(PLENTY))


# --- Pages and names.


def test_page_name_covers_all_previous_tokens():
    tokens = list(range(20))
    names = page_names(tokens, 4)
    assert len(names) == len(set(names)) == 5
    assert page_names(tokens[:19], 4) == names[:4]
    other = page_names([99, *tokens[1:]], 4)
    assert not set(other) & set(names)


class Memories:
    """Performs the copies requested by a BlockManager on names instead of keys and values."""

    def __init__(self, num_hbm_pages: int, num_host_pages: int):
        self.blocks = BlockManager(num_hbm_pages, num_host_pages)
        self.hbm = [b""] * num_hbm_pages
        self.host = [b""] * num_host_pages
        self.running: list[tuple[list[int], list[bytes]]] = []

    def start(self, tokens: list[int], page_size: int, extra: int) -> None:
        names = page_names(tokens, page_size)
        pages_in_use = {page for pages, _ in self.running for page in pages}
        before = [list(self.hbm), list(self.host)]
        try:
            placement = self.blocks.place(names, len(names) + extra)
        except MemoryError:
            assert len(names) + extra > len(self.hbm) - len(pages_in_use)
            assert before == [self.hbm, self.host]
            return
        for ids in (placement.stores, placement.loads):
            for side in zip(*ids, strict=True):
                assert len(set(side)) == len(side)
        for host_page, page in placement.stores:
            assert page not in pages_in_use, "a page in use was evicted"
            self.host[host_page] = self.hbm[page]
        for host_page, page in placement.loads:
            assert page not in pages_in_use, "a page in use was written over"
            self.hbm[page] = self.host[host_page]
        found = placement.found_in_hbm + len(placement.loads)
        pages = placement.pages
        assert len(pages) == len(set(pages)) == len(names) + extra
        assert [self.hbm[page] for page in pages[:found]] == names[:found]
        assert not pages_in_use & set(pages[found:])
        for position, page in enumerate(pages[found:], start=found):
            self.hbm[page] = names[position] if position < len(names) else b"part of a page"
        self.blocks.publish(pages, names)
        self.running.append((pages, names))

    def finish(self, which: int) -> None:
        self.blocks.release(self.running.pop(which)[0])

    def check(self) -> None:
        blocks = self.blocks
        for pages, names in self.running:
            assert [self.hbm[page] for page in pages[: len(names)]] == names
        used = [page for pages, _ in self.running for page in pages]
        counts = [used.count(page) for page in range(len(self.hbm))]
        assert blocks._references == counts
        states = [*blocks._free, *blocks._cached, *set(used)]
        assert sorted(states) == list(range(len(self.hbm))), "each page has one state"
        assert {page: name for name, page in blocks._page_of.items()} == blocks._name_of
        assert all(self.hbm[page] == name for page, name in blocks._name_of.items())
        assert set(blocks._cached) <= set(blocks._name_of)
        on_host = [*blocks._host_free, *blocks._host_page_of.values()]
        assert sorted(on_host) == list(range(len(self.host)))
        assert all(self.host[page] == name for name, page in blocks._host_page_of.items())


@hypothesis.settings(deadline=None)
@hypothesis.given(st.data())
def test_page_contents_match_names(data):
    memories = Memories(data.draw(st.integers(1, 9), "HBM"), data.draw(st.integers(0, 9), "host"))
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        if memories.running and data.draw(st.booleans(), "finish"):
            memories.finish(data.draw(st.integers(0, len(memories.running) - 1), "which"))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), max_size=12), "tokens")
            memories.start(tokens, page_size=2, extra=data.draw(st.integers(0, 2), "extra"))
        memories.check()


def test_evicted_page_is_reloaded_and_stored_once():
    blocks = BlockManager(num_hbm_pages=2, num_host_pages=4)
    first, second = page_names([1, 2], 1), page_names([3, 4], 1)
    counts = []
    for names in (first, second, first, second):
        placement = blocks.place(names, 2)
        blocks.publish(placement.pages, names)
        blocks.release(placement.pages)
        counts.append((len(placement.stores), len(placement.loads)))
    assert counts == [(0, 0), (2, 0), (2, 2), (0, 2)]


def test_shared_page_is_released_by_last_user():
    blocks = BlockManager(num_hbm_pages=3, num_host_pages=0)
    (name,) = page_names([7], 1)
    first = blocks.place([name], 1)
    blocks.publish(first.pages, [name])
    second = blocks.place([name], 1)
    assert (second.pages, second.found_in_hbm) == (first.pages, 1)
    blocks.release(first.pages)
    others = blocks.place([], 2)
    assert not set(others.pages) & set(second.pages)
    with pytest.raises(MemoryError, match="requested 1 HBM pages, 0 available"):
        blocks.place([], 1)


# --- The engine.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_does_not_change_answers(layout, all_in_hbm):
    engine = make_engine(num_host_pages=PLENTY, layout=layout)
    turns = served(engine)
    assert answers(turns) == answers(all_in_hbm)
    assert len(turns) == NUM_TURNS and all(len(turn.answer) == NEW_TOKENS for turn in turns)
    last = report.rounds(turns, engine.spec)[-1]
    assert last["on host"] > last["prompt"] / 4
    assert last["loaded MiB"] > 0 and last["stored MiB"] > 0
    assert last["recomputed"] < len(CONVERSATIONS) * LIMITS.page_size, "parts of pages at most"


def test_recomputation_does_not_change_answers(all_in_hbm):
    engine = make_engine()
    turns = served(engine)
    assert answers(turns) == answers(all_in_hbm)
    last = report.rounds(turns, engine.spec)[-1]
    assert last["recomputed"] > last["prompt"] / 4 and last["on host"] == 0


def test_host_pool_overflow_does_not_change_answers(all_in_hbm):
    engine = make_engine(num_host_pages=24)
    turns = served(engine)
    assert answers(turns) == answers(all_in_hbm)
    total = report.row(turns, engine.spec)
    assert total["on host"] > 0 and total["recomputed"] > total["on host"]


def test_offload_does_not_change_the_computed_tokens(all_in_hbm):
    turns = served(make_engine(num_host_pages=PLENTY))
    found = [turn.placement.found_in_hbm + len(turn.placement.loads) for turn in turns]
    assert found == [turn.placement.found_in_hbm for turn in all_in_hbm]


def test_negative_control_corrupt_loads_change_answers(all_in_hbm):
    engine = make_engine(num_host_pages=PLENTY)

    def corrupt(text: str) -> None:
        noise = np.random.default_rng(0).standard_normal(engine.pool.data.shape, np.float32)
        data = jax.device_put(noise, engine.pool.data.sharding)
        engine.pool = dataclasses.replace(engine.pool, data=data)

    turns = serve(engine, ByteTokenizer(), CONVERSATIONS, NEW_TOKENS, corrupt)
    same = [a == b for a, b in zip(answers(turns), answers(all_in_hbm), strict=True)]
    assert all(same[: len(CONVERSATIONS)]), "first answers have no history"
    loaded = [equal for turn, equal in zip(turns, same, strict=True) if turn.placement.loads]
    assert loaded and not all(loaded)


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_serving_does_not_compile():
    engine = make_engine(num_host_pages=PLENTY)
    jax.clear_caches()
    with counted_compilations() as compilations:
        engine.warm_up()
        assert compilations
        compilations.clear()
        for count in (1, 2, len(CONVERSATIONS)):
            turns = served(engine, dict(list(CONVERSATIONS.items())[:count]))
        assert any(turn.placement.loads for turn in turns)
        assert not compilations


def test_step_copies_at_most_once_per_direction(monkeypatch):
    engine = make_engine(num_host_pages=PLENTY)
    module = importlib.import_module(Engine.__module__)
    calls: list[str] = []

    def record(name, program):
        def recorded(*args):
            calls.append(name)
            return program(*args)

        monkeypatch.setattr(module, name, recorded)

    for name in ("store", "load", "next_tokens"):
        record(name, getattr(module, name))
    steps = []

    def note(text: str) -> None:
        steps.append(tuple(calls))
        calls.clear()

    serve(engine, ByteTokenizer(), CONVERSATIONS, NEW_TOKENS, note)
    order = ("store", "load", "next_tokens", "next_tokens")
    for step in steps:
        remaining = iter(order)
        assert all(name in remaining for name in step), step
    assert order in steps


def test_answer_ends_at_stop_token(all_in_hbm):
    stop = all_in_hbm[0].answer[3]
    turns = served(make_engine(PLENTY, stop=stop), {"rain": CONVERSATIONS["rain"][:1]})
    assert turns[0].answer == all_in_hbm[0].answer[: all_in_hbm[0].answer.index(stop) + 1]


def test_exceeded_limits_raise():
    with pytest.raises(ValueError, match=r"num_hbm_pages must hold, got .* and 79"):
        make_engine(num_hbm_pages=79)
    with pytest.raises(ValueError, match=r"turn 2 of long: .* exceed pages_per_turn="):
        make_engine().submit(Turn("long", 2, [0] * 48 * 8, 1))


# --- The command.


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": name, "turns": turns}) for name, turns in CONVERSATIONS.items()]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_command_writes_results(prompts, tmp_path):
    json_path, plot_path = tmp_path / "out.json", tmp_path / "out.png"
    command = [sys.executable, "-m", "examples.serving", "--prompts", prompts]
    command += ["--max-new-tokens", "4", "--json", str(json_path)]
    with contextlib.suppress(ImportError):
        importlib.import_module("matplotlib")
        command += ["--plot", str(plot_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    num_tokens = 4 * NUM_TURNS
    last_line = done.stdout.splitlines()[-1]
    assert last_line == f"The {num_tokens} tokens equal those of the runs without offload."
    summary = json.loads(json_path.read_text())
    assert set(summary["tokens_equal"].values()) == {True}
    assert sum(len(t["tokens"]) for t in summary["turns"] if t["run"] == "offload") == num_tokens
    assert summary["rounds"]["offload"][-1]["on host"] > 0
    assert plot_path.exists() == ("--plot" in command)


def test_command_fails_on_token_mismatch(prompts, monkeypatch, capsys):
    command = importlib.import_module("examples.serving.__main__")
    runs = []

    def tampering(*args):
        turns = serve(*args)
        runs.append(turns)
        if len(runs) == 3:
            turns[-1].answer[-1] ^= 1
        return turns

    monkeypatch.setattr(command, "serve", tampering)
    monkeypatch.setattr(command, "TINY", CONFIG)
    monkeypatch.setattr(command, "QWEN3_600M", CONFIG)
    assert command.main(["--prompts", prompts, "--max-new-tokens", "2"]) == 1
    assert "DIFFER" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max-new-tokens=0", "argument --max-new-tokens: invalid positive value: '0'"),
        ("--num-hbm-pages=2", "--num-hbm-pages: the longest conversation needs"),
    ],
)
def test_command_rejects_invalid_option(option, message, prompts, capsys):
    command = importlib.import_module("examples.serving.__main__")
    with pytest.raises(SystemExit) as error:
        command.main(["--prompts", prompts, option])
    assert message in f"{error.value} {capsys.readouterr().err}"


def test_command_rejects_invalid_prompts_file(tmp_path):
    command = importlib.import_module("examples.serving.__main__")
    path = tmp_path / "bad.jsonl"
    line = '{"id": "a", "turns": ["b"]}\n'
    for text in ('{"id": "a"}', '{"id": "a", "turns": []}', "no JSON", "[]", "", line * 2):
        path.write_text(text)
        with pytest.raises(SystemExit, match=r"bad\.jsonl: each line must have id and turns"):
            command.main(["--prompts", str(path)])
