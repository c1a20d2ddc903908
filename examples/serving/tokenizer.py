"""Tokenizers and chat templates.

A conversation is append-only: tokens processed by the model never change, so that its pages can be
reused. `prompt` therefore returns only the tokens added by a new turn.
"""

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shortened

from .checkpoint import end_tokens

SYSTEM = (
    "You are a patient and precise assistant. Answer in plain words, say what you are not sure "
    "of, and ask back when a question can be read in two ways."
)


def turns(messages: object) -> list[tuple[str, str]]:
    """Role and text of each message of a chat; ValueError for anything but text.

    Text is a string or, as in the OpenAI API, a list of text parts, which are joined by newlines.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of at least one, got {shortened(messages)}")
    found = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{index}] must be an object, got {shortened(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{index}].role must be a string, got {shortened(role)}")
        texts = [content] if isinstance(content, str) else _texts(content)
        if not texts:
            expected = "must be a string or a list of text parts"
            raise ValueError(f"messages[{index}].content {expected}, got {shortened(content)}")
        found.append((role, "\n".join(texts)))
    return found


def _texts(content: object) -> list[str]:
    """The texts of a list of text parts; empty if it is anything else."""
    parts = content if isinstance(content, list) else []
    known = [
        part["text"]
        for part in parts
        if isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
    return known if len(known) == len(parts) else []


class ByteTokenizer:
    """One token per byte, without stop tokens, which random weights would not produce."""

    stop: frozenset[int] = frozenset()

    def prompt(self, text: str, history: Sequence[int]) -> list[int]:
        opening = "" if history else SYSTEM
        return list(f"{opening}\n\nUser: {text}\n\nAssistant: ".encode())

    def chat(self, messages: object) -> list[int]:
        """ValueError as in `turns`."""
        said = [f"{role.title()}: {text}" for role, text in turns(messages)]
        return self.encode("\n\n".join([*said, "Assistant: "]))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; random weights may have a larger vocabulary: the last byte of each token."""
        return bytes(token % 256 for token in tokens).decode(errors="replace")


class QwenTokenizer:
    """The tokenizer.json of a checkpoint, with the chat format of Qwen3 (thinking off)."""

    def __init__(self, directory: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise SystemExit("--model requires a tokenizer: pip install tokenizers") from error
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._end_of_turn = self._tokenizer.token_to_id("<|im_end|>")
        self.stop = end_tokens(directory) | {self._end_of_turn}

    def prompt(self, text: str, history: Sequence[int]) -> list[int]:
        opening = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        if history:  # a truncated answer, or one that another token ended, has none
            opening = "\n" if history[-1] == self._end_of_turn else "<|im_end|>\n"
        question = f"<|im_start|>user\n{text}<|im_end|>\n"
        answer = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        return self.encode(opening + question + answer)

    def chat(self, messages: object) -> list[int]:
        """ValueError as in `turns`."""
        said = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns(messages)]
        return self.encode("".join(said) + "<|im_start|>assistant\n<think>\n\n</think>\n\n")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


Tokenizer = ByteTokenizer | QwenTokenizer
