"""Conversation files of the serving example."""

import pytest

from examples.serving.__main__ import read_conversations

pytestmark = pytest.mark.host_only


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        '{"id": 1}',
        '{"id": [], "turns": ["a"]}',
        '{"id": 1, "turns": []}',
        '{"id": 1, "turns": "abc"}',
        '{"id": 1, "turns": ["a", 2]}',
        '{"id": 1, "turns": {"a": 1}}',
        '{"id": 1, "turns": ["a"]}\n{"id": 1, "turns": ["b"]}',
        "[" * 100_000,
    ],
)
def test_invalid_conversations_exit_with_the_file(text, tmp_path):
    path = tmp_path / "conversations.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit, match=str(path)):
        read_conversations(path)


def test_ends_of_lines_of_unicode_within_strings(tmp_path):
    path = tmp_path / "conversations.jsonl"
    text = "a\u2028b\u0085c"
    path.write_text(f'{{"id": 1, "turns": ["{text}"]}}\n{{"id": 2, "turns": ["d"]}}\n')
    assert read_conversations(path) == {1: [text], 2: ["d"]}
