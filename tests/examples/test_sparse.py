"""The sparse-attention example: equal tokens with the rows in HBM and in host memory."""

import numpy as np
import pytest

from examples.sparse import __main__ as command
from examples.sparse.engine import Engine, InHbm, InHostMemory, Sizes
from examples.sparse.model import Config, init_params

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

CONFIG = Config(vocab=200, hidden=32, latent=16, top_k=8)
SIZES = Sizes(batch=2, max_length=96, max_prompt=48, page_size=8, slots=12)


def test_tokens_equal_those_with_all_rows_in_hbm():
    """More requests than fit at a time: places and pages are used again."""
    params, rng = init_params(CONFIG, 0), np.random.default_rng(1)
    prompts = [rng.integers(0, 200, length).tolist() for length in (1, 8, 48)]
    engines = [Engine(CONFIG, SIZES, params, tier(CONFIG, SIZES)) for tier in (InHbm, InHostMemory)]
    in_hbm, in_host_memory = (engine.generate(prompts, 30) for engine in engines)
    assert in_host_memory == in_hbm
    assert [len(answer) for answer in in_hbm] == [30] * 3
    assert len(set(in_hbm[2])) > 9, "an answer that tells nothing about the rows"
    assert 0 < engines[1].missing < engines[1].chosen


@pytest.mark.parametrize(("prompt", "new"), [(49, 1), (48, 49)])
def test_requests_that_are_too_long_are_rejected(prompt, new):
    engine = Engine(CONFIG, SIZES, init_params(CONFIG, 0), InHbm(CONFIG, SIZES))
    with pytest.raises(ValueError, match="at most 48 and, in all, 96 tokens"):
        engine.generate([[1] * prompt], new)


def test_command(capsys):
    assert command.main(["--requests", "3", "--new-tokens", "8"]) == 0
    assert "tokens equal those with all rows in HBM" in capsys.readouterr().out
