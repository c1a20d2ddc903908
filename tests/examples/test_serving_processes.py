"""The serving engine under tensor parallelism in several processes."""

import pytest

from tests.collectives.test_multiprocess import ONE_EACH, results_of_all
from tests.util.serving_checks import conversations

pytestmark = [pytest.mark.cpu_only, pytest.mark.end_to_end]


def test_processes_give_the_answers_of_one_device(tmp_path):
    """HBM holds half of the conversations, whose pages are evicted and loaded again."""
    first, second = results_of_all(tmp_path, "conversations_of_ranks", ONE_EACH[2], [1, 0])
    assert first == second
    answers, loaded = first
    assert (answers, loaded > 20) == (conversations()[0], True), loaded
