"""The text of an answer that grows token by token."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder makes of a character whose last bytes are missing


class AnswerText:
    """The characters of an answer, up to the stop string that is complete first.

    An update decodes and searches only what the last one could not: decoding the whole answer for
    each token would cost more, the longer it is.

    Args:
      decode: returns the text of tokens. Texts of parts that are whole characters can be joined.
      stop: the stop strings.
      start: number of tokens before the answer.

    Attributes:
      text: whole characters, unless the answer is finished.
      stopped: whether a stop string has ended it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], start: int):
        self.text, self.stopped = "", False
        self.longest_stop = max(map(len, stop), default=1)
        self._decode, self._stop = decode, stop
        self._num_tokens, self._num_characters = start, 0  # that no later token changes

    def update(self, tokens: Sequence[int], finished: bool) -> None:
        """Takes all tokens so far, those before the answer included.

        Another thread may append to `tokens` meanwhile; the next update takes those.
        """
        if self.stopped:
            return
        tokens = tokens[self._num_tokens :]
        new = self._decode(tokens)
        whole = new if finished else new.rstrip(_INCOMPLETE)
        self.text = self.text[: self._num_characters] + whole
        searched = max(0, self._num_characters - self.longest_stop + 1)
        places = [(self.text.find(part, searched), len(part)) for part in self._stop]
        ends = [(place + length, place) for place, length in places if place >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)[1]], True
        elif whole == new:
            self._num_tokens += len(tokens)
            self._num_characters = len(self.text)
