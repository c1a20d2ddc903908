"""The serving example: its answers with and without offload, and its command."""

import contextlib
import ctypes
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import jaxkv
from examples.serving import report
from examples.serving.__main__ import serve
from examples.serving.engine import Engine, Limits
from examples.serving.model import Config
from examples.serving.presets import init_params
from examples.serving.request import Request
from examples.serving.tokenizer import ByteTokenizer
from jaxkv._src.cache.host_layout import LAYOUTS
from jaxkv.offload import FileTier

pytestmark = pytest.mark.end_to_end

CONFIG = Config(256, 64, 96, 2, 4, 2, 16)
LIMITS = Limits(page_size=8, batch=3, token_budget=36, pages_per_request=48, copy_pages=16)
CONVERSATIONS = {
    name: [f"What is {name}, and since when?", f"Who told you that of {name}?", "Why?"]
    for name in ("rain", "a lighthouse", "the sea", "bread", "an owl", "winter")
}
NUM_TURNS, NEW_TOKENS = sum(map(len, CONVERSATIONS.values())), 8
FEW = 80  # pages
PLENTY = 300  # pages, for all conversations together


@functools.cache
def params():
    return init_params(CONFIG, 0, "float32")


def make_engine(num_hbm_pages=FEW, num_host_pages=0, **options):
    return Engine(CONFIG, params(), LIMITS, num_hbm_pages, num_host_pages, **options)


def served(engine, conversations=CONVERSATIONS):
    return serve(engine, ByteTokenizer(), conversations, NEW_TOKENS)


def answers(turns):
    return [turn.answer for turn in turns]


@pytest.fixture(scope="module")
def all_in_hbm():
    return served(make_engine(PLENTY))


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


def test_recomputed_with_hbm_for_all_is_the_ends_of_last_pages(all_in_hbm):
    """As the command explains the figure: a page is found again once it is full."""
    spec = CONFIG.cache_spec(LIMITS.page_size, np.float32)
    later = [turn for turn in all_in_hbm if turn.index]
    ends = [turn.known % LIMITS.page_size for turn in later]
    assert report.row(later, spec)["recomputed"] == sum(ends) > 0


def test_recomputation_does_not_change_answers(all_in_hbm):
    engine = make_engine()
    turns = served(engine)
    assert answers(turns) == answers(all_in_hbm)
    last = report.rounds(turns, engine.spec)[-1]
    assert last["recomputed"] > last["prompt"] / 4 and last["on host"] == 0


def test_host_pool_overflow_does_not_change_answers(all_in_hbm):
    engine = make_engine(num_host_pages=200)
    turns = served(engine)
    assert answers(turns) == answers(all_in_hbm)
    total = report.row(turns, engine.spec)
    assert total["on host"] > 0 and total["recomputed"] > 0


def test_negative_control_corrupt_loads_change_answers(all_in_hbm):
    engine = make_engine(num_host_pages=PLENTY)

    def corrupt(text: str) -> None:
        pool = jax.block_until_ready(engine.pool)
        noise = np.random.default_rng(0).standard_normal(pool.data.size, np.float32)
        ctypes.memmove(pool.view().ctypes.data, noise.ctypes.data, noise.nbytes)

    turns = serve(engine, ByteTokenizer(), CONVERSATIONS, NEW_TOKENS, corrupt)
    same = [a == b for a, b in zip(answers(turns), answers(all_in_hbm), strict=True)]
    loaded = [
        equal
        for turn, equal in zip(turns, same, strict=True)
        if (turn.first_placement and turn.first_placement.loaded)
    ]
    assert loaded and not all(loaded)


def test_stop_tokens_end_answers(all_in_hbm):
    """All tokens that the first answers start with."""
    tokenizer = ByteTokenizer()
    firsts = [turn for turn in all_in_hbm if turn.index == 0]
    tokenizer.stop = frozenset(turn.answer[0] for turn in firsts)
    opening = {name: turns[:1] for name, turns in CONVERSATIONS.items()}
    turns = serve(make_engine(), tokenizer, opening, NEW_TOKENS)
    assert answers(turns) == [turn.answer[:1] for turn in firsts]


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
        assert any(turn.first_placement and turn.first_placement.loaded for turn in turns)
        assert not compilations


def test_exceeded_limits_raise():
    with pytest.raises(
        ValueError, match="num_hbm_pages=47: a request may need pages_per_request=48"
    ):
        make_engine(num_hbm_pages=47)
    with pytest.raises(ValueError, match=r"request: 384 prompt tokens and 1 new ones; .* 384"):
        make_engine().submit(Request([0] * 48 * 8, 1))


# --- The command.


def test_a_tier_serves_the_next_process(tmp_path, all_in_hbm):
    """Its engine has an empty host pool; one of other weights has other keys."""
    conversations = dict([*CONVERSATIONS.items()][:2])
    expected = [turn.answer for turn in all_in_hbm if turn.name in conversations]
    totals, opened = [], []

    def tiers(pool):
        size = jaxkv.OffloadEngine.tier_block_bytes(pool)
        opened.append(FileTier(tmp_path, size, capacity_bytes=1 << 30))
        return opened[-1:]

    with pytest.raises(ValueError, match="name of the weights"):
        make_engine(num_host_pages=PLENTY, tiers=tiers)
    opened.pop().close()
    for _ in range(2):
        engine = make_engine(num_host_pages=PLENTY, tiers=tiers, weights="a")
        engine.host._tiers._timeout_s = 60.0  # the machine may be busy
        assert answers(served(engine, conversations)) == expected
        assert engine.host.drain()
        opened[-1].close()
        totals.append(engine.host.metrics())
    promoted, cascaded, loaded, missed = (
        [total[f"kv_offload_{name}"] for total in totals]
        for name in ("promoted_blocks", "cascaded_blocks", "loaded_blocks", "tier_read_misses")
    )
    assert promoted[0] == 0 and missed == [0, 0]
    assert loaded[1] >= promoted[1] > 0.5 * cascaded[0]
    assert promoted[1] + cascaded[1] == cascaded[0]
    keys = [make_engine(weights=name)._hasher.hashes(range(8)) for name in ("a", "b")]
    assert keys[0] != keys[1]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": name, "turns": turns}) for name, turns in CONVERSATIONS.items()]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_command_writes_results(prompts, tmp_path):
    json_path, plot_path = tmp_path / "out.json", tmp_path / "out.png"
    command = [sys.executable, "-m", "examples.serving", "--prompts", prompts, "--preset", "tiny"]
    command += ["--dtype", "float32", "--max-new-tokens", "4", "--json", str(json_path)]
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
            turns[-1].tokens[-1] ^= 1
        return turns

    monkeypatch.setattr(command, "serve", tampering)
    monkeypatch.setattr(command, "PRESETS", {"tiny": CONFIG, "qwen3-0.6b": CONFIG})
    arguments = ["--prompts", prompts, "--dtype", "float32", "--max-new-tokens", "2"]
    assert command.main(arguments) == 1
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
