"""Tokenizers and chat templates.

A conversation is append-only: tokens processed by the model never change, so that its pages can be
reused. `prompt` therefore returns only the tokens added by a new turn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

SYSTEM = (
    "You are a patient and precise assistant. Answer in plain words, say what you are not sure "
    "of, and ask back when a question can be read in two ways."
)


class ByteTokenizer:
    """One token per byte, without a stop token, which random weights would not produce."""

    stop: int | None = None

    def prompt(self, text: str, history: Sequence[int]) -> list[int]:
        opening = "" if history else SYSTEM
        return list(f"{opening}\n\nUser: {text}\n\nAssistant: ".encode())

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        turns = [f"{message['role'].title()}: {message['content']}" for message in messages]
        return self.encode("\n\n".join([*turns, "Assistant: "]))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Of random weights with a larger vocabulary, the last byte of each token."""
        return bytes(token % 256 for token in tokens).decode(errors="replace")


class QwenTokenizer:
    """The tokenizer.json of a checkpoint, with the chat format of Qwen3 (thinking off)."""

    def __init__(self, directory: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise SystemExit("--model requires a tokenizer: pip install tokenizers") from error
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.stop = self._tokenizer.token_to_id("<|im_end|>")

    def prompt(self, text: str, history: Sequence[int]) -> list[int]:
        opening = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        if history:  # a truncated answer has no end token
            opening = "\n" if history[-1] == self.stop else "<|im_end|>\n"
        question = f"<|im_start|>user\n{text}<|im_end|>\n"
        answer = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        return self.encode(opening + question + answer)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return self.encode("".join(turns) + "<|im_start|>assistant\n<think>\n\n</think>\n\n")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


Tokenizer = ByteTokenizer | QwenTokenizer
