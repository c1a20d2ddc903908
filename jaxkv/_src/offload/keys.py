"""Block keys: chained hashes of token blocks, and the keys of a group."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from jaxkv._src.offload.integers import checked_integer, checked_window

_VERSION = b"jaxkv.offload/1"  # to be changed with the bytes that are hashed
_GROUP_BYTES = 4
_TOKEN_BYTES = 8
_HASH_BYTES = 32


class BlockHasher:
    """Chained hashes of the full token blocks of a sequence.

    Hash i identifies the tokens of blocks 0 to i, the model and the adapter, hence the keys and
    values of block i. Hashes are SHA-256 over bytes of fixed order and width: equal in all
    processes, machines and Python versions.

    Tokens are hashed as int64. For content that is not text, such as an image, replace the
    placeholder tokens by integers derived from a hash of the content: otherwise prompts that differ
    in their images only have equal keys.

        hasher = jaxkv.offload.BlockHasher(16, model="Qwen/Qwen3-8B@4f8a bfloat16")
        chain = hasher.hashes(prompt)                         # one hash for each full block
        hasher.extend(chain, prompt + generated)              # as the sequence grows

    vLLM's prefix cache chains its block hashes in the same way, over serialized Python objects.

    Args:
      block_size: tokens of a block.
      model: everything besides tokens and adapter that keys and values depend on: the weights with
        their revision, the dtype of the cache, and other relevant engine configuration.
      adapter: name and revision of a LoRA adapter, or another salt, such as a tenant's.

    Raises:
      TypeError: `model` or `adapter` is not a str.
      ValueError: `block_size` is not a positive integer.
    """

    def __init__(self, block_size: int, *, model: str, adapter: str = "") -> None:
        self.block_size = checked_integer(
            "BlockHasher: block_size", block_size, "an integer, at least 1 token", 1
        )
        for name, salt in (("model", model), ("adapter", adapter)):
            if not isinstance(salt, str):
                raise TypeError(
                    f"BlockHasher: {name}={salt!r:.60}; pass its name and revision as a str"
                )
        root = hashlib.sha256(_VERSION)
        for field in (str(self.block_size), model, adapter):
            content = field.encode()
            root.update(len(content).to_bytes(8, "little") + content)
        self._root = root.digest()

    def hashes(self, tokens: Sequence[int], parent: bytes | None = None) -> list[bytes]:
        """Hashes of all full blocks of `tokens`; tokens after the last full block are ignored.

        Args:
          tokens: token ids that fit int64; a list, `array.array` or NumPy array. The first one is
            at a block boundary.
          parent: hash of the block before; None at the beginning of a sequence.

        Returns:
          Hashes of 32 bytes.

        Raises:
          TypeError: `tokens` is not a sequence, or is bytes or a str.
          ValueError: a token is not an integer, or does not fit int64; or `parent` is not a hash.
        """
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        if not isinstance(tokens, Sequence) or isinstance(tokens, bytes | bytearray | str):
            raise TypeError(
                f"BlockHasher.hashes: tokens is of type {type(tokens).__name__}; pass a list, "
                "array.array or NumPy array of integers"
            )
        try:
            content = memoryview(struct.pack(f"<{len(tokens)}q", *tokens))
        except struct.error as error:
            raise ValueError(f"BlockHasher.hashes: tokens must be int64: {error}") from None
        last = self._root if parent is None else parent
        if not isinstance(last, bytes) or len(last) != _HASH_BYTES:
            raise ValueError(
                f"BlockHasher.hashes: parent={parent!r:.60}; pass the hash of the block before, "
                f"{_HASH_BYTES} bytes, or None"
            )
        block_bytes = _TOKEN_BYTES * self.block_size
        found = []
        for end in range(block_bytes, len(content) + 1, block_bytes):
            last = hashlib.sha256(last + content[end - block_bytes : end]).digest()
            found.append(last)
        return found

    def extend(self, chain: list[bytes], tokens: Sequence[int]) -> None:
        """Appends the hashes of the full blocks that `chain` lacks; call it as a sequence grows.

        Args:
          chain: hashes of the first blocks of the sequence, or an empty list.
          tokens: the whole sequence, as for `hashes`.

        Raises:
          TypeError: as for `hashes`.
          ValueError: `chain` has more blocks than `tokens`; or as for `hashes`.
        """
        start = len(chain) * self.block_size
        if len(tokens) < start:
            raise ValueError(
                f"BlockHasher.extend: len(chain)={len(chain)}, with block_size={self.block_size}, "
                f"but len(tokens)={len(tokens)}; pass the whole sequence"
            )
        if len(tokens) >= start + self.block_size:
            chain += self.hashes(tokens[start:], chain[-1] if chain else None)


@dataclasses.dataclass(frozen=True)
class BlockGroup:
    """A kind of layer with its own blocks, and which of them a prefix needs.

    All groups have the same number of tokens in a block.

    A draft layer of EAGLE or MTP computes the last position of a block from the first token of the
    next one. With `lookahead=1` its block i has the key of chain position i + 1, which covers this
    token. Hence the last block of a request, not yet determined, has no key: it can be neither
    stored nor found, and the same rule serves stores and lookups.

        full = jaxkv.offload.BlockGroup(0)
        window = jaxkv.offload.BlockGroup(1, window=8)        # 128 tokens, in blocks of 16
        state = jaxkv.offload.BlockGroup(2, window=1)         # Mamba: the last state
        draft = jaxkv.offload.BlockGroup(3, lookahead=1)      # EAGLE, MTP

    The groups are those of vLLM's hybrid KV cache manager.

    Attributes:
      id: 0 to 2**32 - 1, part of the keys.
      window: number of blocks before the end of a prefix that attention reads:
        `ceil((window_tokens - 1) / block_size)`; None for all of them.
      lookahead: number of following blocks that the contents of a block depend on.

    Raises:
      ValueError: a number is not an integer, or is out of range.
    """

    id: int = 0
    window: int | None = None
    lookahead: int = 0

    def __post_init__(self) -> None:
        most = (1 << 8 * _GROUP_BYTES) - 1
        checked_integer("BlockGroup: id", self.id, f"an integer from 0 to {most}", 0, most)
        checked_window("BlockGroup", self.window)
        expected = "an integer, at least 0 blocks"
        checked_integer("BlockGroup: lookahead", self.lookahead, expected, 0)

    def keys(self, chain: Sequence[bytes]) -> list[bytes]:
        """Keys of the blocks of a sequence: `keys(chain)[i]` is that of block i.

        Args:
          chain: hashes of the sequence, from its beginning; see `BlockHasher.hashes`.

        Returns:
          `len(chain) - lookahead` keys of 36 bytes, or none.
        """
        suffix = int(self.id).to_bytes(_GROUP_BYTES, "big")
        return [digest + suffix for digest in chain[self.lookahead :]]

    def needed(self, num_blocks: int) -> range:
        """Blocks of this group that a prefix of `num_blocks` blocks needs."""
        return range(0 if self.window is None else max(0, num_blocks - self.window), num_blocks)


def checked_keys(
    operation: str, keys: Any, name: str = "keys", *, ordered: bool = True
) -> tuple[bytes, ...]:
    """Raises TypeError unless they are several objects of type `bytes`.

    Where order does not matter, they may be a set. It is sorted: its own order depends on the hash
    seed of the process, and ranks must make the same decisions.
    """
    wrong = (bytes, str, Set, Mapping) if ordered else (bytes, str)
    several = isinstance(keys, Iterable) and not isinstance(keys, wrong)
    found = tuple(keys) if several else (None,)
    for key in found:
        if not isinstance(key, bytes):
            raise TypeError(
                f"{operation}: {name} has to be a sequence of bytes objects, one for each block, "
                f"got {key if several else keys!r:.60}"
            )
    return tuple(sorted(found)) if isinstance(keys, Set) else found


def distinct_keys(operation: str, keys: Any) -> tuple[bytes, ...]:
    """As `checked_keys`; raises ValueError if a key occurs twice."""
    found = checked_keys(operation, keys)
    if len(set(found)) != len(found):
        raise ValueError(f"{operation}: keys has duplicates; pass each block once")
    return found
