"""The text of a growing answer, against the whole text decoded at each token."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.serving.answer_text import AnswerText
from examples.serving.tokenizer import ByteTokenizer

pytestmark = pytest.mark.host_only

characters = st.sampled_from("ab\u00e9\U0001f600\ufffd")
texts = st.text(characters, max_size=12)
stops = st.lists(st.text(characters, min_size=1, max_size=3), max_size=3)
answers = st.one_of(texts.map(str.encode), st.lists(st.sampled_from(b"ab\xc3\xa9\xf0\xff")))


def expected(answer, stop):
    """What precedes the first stop string in the whole characters after each byte."""
    for end in range(1, len(answer) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(bytes(answer[:end]), final=end == len(answer))
        if places := [text.find(part) for part in stop if part in text]:
            return text[: min(places)], True
    return bytes(answer).decode(errors="replace"), False


@given(answer=answers, stop=stops, data=st.data())
def test_any_pieces_give_the_same_text(answer, stop, data):
    tokens = [7, *answer]
    text, end = AnswerText(ByteTokenizer().decode, stop, 1), 1
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        before = text.text
        text.update(tokens[:end], end == len(tokens))
        assert text.stopped or text.text.startswith(before)
    assert (text.text, text.stopped) == expected(answer, stop)


def test_the_cost_of_a_token_does_not_grow_with_the_answer():
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return ByteTokenizer().decode(tokens)

    tokens = list("\u00e9\U0001f600a".encode() * 100)
    text = AnswerText(decode, ["stop"], 0)
    for end in range(1, len(tokens) + 1):
        text.update(tokens[:end], False)
    assert len(text.text) == 300 and max(decoded) == 4


def test_half_a_character_is_no_stop_string():
    text = AnswerText(ByteTokenizer().decode, ["\ufffd"], 0)
    text.update(b"a\xf0\x9f", False)
    assert (text.text, text.stopped) == ("a", False)
    text.update(b"a\xf0\x9f\x98\x80", False)
    assert (text.text, text.stopped) == ("a\U0001f600", False)
    text.update(b"a\xf0\x9f\x98\x80\xf0", True)
    assert (text.text, text.stopped) == ("a\U0001f600", True)


def test_tokens_that_arrive_during_an_update_are_taken_by_the_next():
    tokens, later = list(b"Hello"), list(b", world")

    def decode(new):
        text = ByteTokenizer().decode(new)
        tokens.extend(later)  # by the thread of the engine
        later.clear()
        return text

    text = AnswerText(decode, [], 0)
    text.update(tokens, False)
    text.update(tokens, True)
    assert text.text == "Hello, world"
