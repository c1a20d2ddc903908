"""The hybrid example: generated tokens, recurrent states, and the absence of host syncs."""

import jax
import numpy as np
import pytest

import jaxkv
from examples.hybrid import __main__ as command
from examples.hybrid import engine
from examples.hybrid.engine import Start, run_async, run_sync
from examples.hybrid.model import Config, init_params

pytestmark = pytest.mark.end_to_end

CONFIG = Config(vocab=64, layers="MAM", heads=2, head_dim=8, state_dim=4, block_size=8)
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 0)


@pytest.fixture(scope="module")
def start():
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, CONFIG.vocab, length).tolist() for length in (1, 5, 8, 12, 31)]
    return Start.of(CONFIG, prompts, NEW_TOKENS)


def same_bits(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def test_async_scheduling_is_bitwise_identical(params, start):
    waiting = run_sync(CONFIG, params, start)
    with jaxkv.forbid_host_sync():
        ahead = run_async(CONFIG, params, start)
    jaxkv.check_errors(ahead.cache)
    answers = ahead.answers(start.requests)
    assert answers == waiting.answers(start.requests)
    assert [len(answer) for answer in answers] == [NEW_TOKENS] * len(answers)
    assert same_bits(ahead.cache, waiting.cache)
    assert 0 < ahead.saves < ahead.steps == waiting.steps


def test_saved_states_match_accepted_tokens(params, start):
    """As computed from these tokens alone, as a prompt without rejected tokens."""
    ahead = run_async(CONFIG, params, start)
    tokens = np.asarray(ahead.tokens)
    known = [row[:valid].tolist() for row, valid in zip(tokens, ahead.valid, strict=True)]
    alone_start = Start.of(CONFIG, known, 1)
    alone = run_sync(CONFIG, params, alone_start)
    assert (alone.valid == ahead.valid).all()
    full = [valid // CONFIG.block_size for valid in ahead.valid]
    ids, alone_ids = (
        np.concatenate([row[:count] for row, count in zip(s.block_table, full, strict=True)])
        for s in (start, alone_start)
    )
    for got, want in zip(ahead.cache.states, alone.cache.states, strict=True):
        for name, length in (("conv", CONFIG.window), ("temporal", None)):
            actual, expected = np.asarray(got[name])[ids], np.asarray(want[name])[alone_ids]
            if length:
                actual, expected = actual[:, :length], expected[:, :length]
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_negative_control_skipped_save_changes_states(params, start, monkeypatch):
    monkeypatch.setattr(engine.jaxkv.recurrent, "can_skip_align_postprocess", lambda *args: True)
    assert not same_bits(
        run_async(CONFIG, params, start).cache, run_sync(CONFIG, params, start).cache
    )


def test_command(capsys):
    assert command.main(["--requests", "2", "--new-tokens", "9"]) == 0
    assert "host syncs: 0" in capsys.readouterr().out
