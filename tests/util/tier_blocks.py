"""Blocks for tests of tiers: their bytes follow from their keys."""

import hashlib
from collections.abc import Sequence

from jaxkv.offload import Tier

TIMEOUT_S = 30.0  # of a future; only a failure takes this long


def key(i: int) -> bytes:
    return hashlib.sha256(f"key {i}".encode()).digest() + bytes(4)


def content(block_key: bytes, block_bytes: int) -> bytes:
    return hashlib.shake_128(block_key).digest(block_bytes)


def write(tier: Tier, block_key: bytes) -> bool:
    block = content(block_key, tier.block_bytes)
    return tier.write(block_key, memoryview(block)).result(TIMEOUT_S)


def read(tier: Tier, block_key: bytes) -> bool:
    """Whether it is a hit; fails if the bytes are wrong."""
    into = bytearray(tier.block_bytes)
    found = tier.read(block_key, memoryview(into)).result(TIMEOUT_S)
    assert not found or into == content(block_key, tier.block_bytes), "wrong bytes"
    return found


def all_there(tier: Tier, keys: Sequence[bytes]) -> bool:
    return all(tier.contains(keys)) and all(read(tier, one) for one in keys)
