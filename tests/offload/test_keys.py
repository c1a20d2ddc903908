"""Block keys: stable digests, prefixes, salts, groups."""

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.offload import BlockGroup, BlockHasher

pytestmark = pytest.mark.host_only

HASHER = BlockHasher(4, model="model")
tokens_of_blocks = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)


def test_digests_are_fixed():
    """As computed by sha256 of the documented bytes; stored blocks would be lost if one changed."""
    chain = [digest.hex() for digest in HASHER.hashes(range(9))]
    assert chain == [
        "41f778c379be798ee10781e283e7223aeae6a0f12b0700f7d44b1cab4067f82d",
        "906476efdfd87946a5e35b4c9d131f50e98f20d41c0bb5a6152beb3f4b90d3f6",
    ]
    adapted = BlockHasher(4, model="model", adapter="sql")
    assert adapted.hashes([-1, 2**31, 2**62, 0])[0].hex() == (
        "39a3ca448ed7c84fb6c759b53096de541de0d0b3a11a1c537978785b63ee3917"
    )


@given(tokens_of_blocks, st.integers(1, 5), st.integers(0, 4))
def test_hashes_continue_from_a_parent(tokens, block_size, split):
    hasher = BlockHasher(block_size, model="m")
    chain = hasher.hashes(tokens)
    assert len(chain) == len(tokens) // block_size
    split = min(split, len(chain))
    parent = chain[split - 1] if split else None
    assert chain[split:] == hasher.hashes(tokens[split * block_size :], parent)


@pytest.mark.parametrize("ends", [range(1, 23), (5, 6, 14, 22)])
def test_chains_grow_with_their_sequence(ends):
    tokens, chain = [*range(100, 122)], list[bytes]()
    for end in ends:
        HASHER.extend(chain, tokens[:end])
        assert chain == HASHER.hashes(tokens[:end])


def test_a_chain_longer_than_its_sequence_raises():
    with pytest.raises(ValueError, match=r"len\(chain\)=2, with block_size=4, but len\(tokens\)=7"):
        HASHER.extend(HASHER.hashes(range(8)), range(7))


@given(tokens_of_blocks, tokens_of_blocks)
def test_hashes_are_equal_exactly_for_equal_prefixes(left, right):
    pairs = zip(HASHER.hashes(left), HASHER.hashes(right), strict=False)
    for i, (a, b) in enumerate(pairs):
        assert (a == b) == (left[: 4 * i + 4] == right[: 4 * i + 4])


@pytest.mark.parametrize(
    "other",
    [
        BlockHasher(4, model="other"),
        BlockHasher(4, model="model", adapter="a"),
        BlockHasher(4, model="mode", adapter="l"),  # not the concatenation
    ],
)
def test_salts_separate_equal_tokens(other):
    assert not {*HASHER.hashes(range(8))} & {*other.hashes(range(8))}


def test_block_sizes_do_not_share_keys():
    assert BlockHasher(2, model="m").hashes(range(4)) != BlockHasher(4, model="m").hashes(range(4))
    twice = BlockHasher(8, model="model").hashes(range(8))
    assert not {*twice} & {*HASHER.hashes(range(8))}


@pytest.mark.parametrize(
    "form",
    [tuple, lambda x: array("i", x), lambda x: np.array(x, np.int32), lambda x: np.array(x)[::1]],
    ids=["tuple", "array", "int32", "int64"],
)
def test_all_forms_of_tokens_have_the_same_hashes(form):
    tokens = [5, 0, 2**31 - 1, 7]
    assert HASHER.hashes(form(tokens)) == HASHER.hashes(tokens)


def test_wrong_tokens_raise():
    with pytest.raises(ValueError, match="tokens must be int64: argument out of range"):
        HASHER.hashes([0, 0, 0, 2**63])
    with pytest.raises(ValueError, match=r"tokens must be int64: .*not an integer"):
        HASHER.hashes([0.5] * 4)  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [{1, 2}, {1: 2}, bytes(8), bytearray(8), "1234"])
def test_tokens_are_a_sequence_of_integers(wrong: Any):
    with pytest.raises(TypeError, match=f"tokens is of type {type(wrong).__name__}; pass a list"):
        HASHER.hashes(wrong)


@pytest.mark.parametrize("parent", [b"abc", "a" * 32, BlockGroup().keys([bytes(32)])[0]])
def test_a_parent_is_a_hash(parent):
    with pytest.raises(ValueError, match=r"parent=.*pass the hash of the block before, 32 bytes"):
        HASHER.hashes(range(8), parent)


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ({"block_size": 0}, ValueError, "block_size=0; pass an integer, at least 1 token"),
        ({"block_size": 1.5}, ValueError, "block_size is of type float"),
        ({"model": None}, TypeError, "model=None; pass its name and revision as a str"),
        ({"adapter": 3}, TypeError, "adapter=3"),
    ],
)
def test_wrong_hashers_raise(wrong, error, message):
    with pytest.raises(error, match=f"BlockHasher: {message}"):
        BlockHasher(**{"block_size": 4, "model": "m", **wrong})


def test_keys_of_groups_differ_and_end_in_the_group():
    chain = HASHER.hashes(range(12))
    keys = [BlockGroup(i).keys(chain) for i in (0, 1, 256)]
    assert len({key for group in keys for key in group}) == 9
    assert keys[2] == [digest + bytes([0, 0, 1, 0]) for digest in chain]
    integer: Any = np.int32(256)
    assert BlockGroup(integer).keys(chain) == keys[2]


def test_draft_block_has_a_key_once_the_next_block_is_known():
    chain = HASHER.hashes(range(12))
    draft = BlockGroup(3, lookahead=1)
    assert draft.keys(chain[:1]) == draft.keys([]) == []
    assert draft.keys(chain[:2]) == draft.keys(chain)[:1]
    other = HASHER.hashes([*range(4), 9, *range(5, 12)])
    assert chain[0] == other[0]
    assert draft.keys(chain)[0] != draft.keys(other)[0]


def test_needed_blocks():
    assert [*BlockGroup(0).needed(3)] == [0, 1, 2]
    assert [*BlockGroup(0, window=2).needed(5)] == [3, 4]
    assert [*BlockGroup(0, window=2).needed(1)] == [0]


@pytest.mark.parametrize("wrong", [{"id": -1}, {"id": 2**32}, {"window": 0}, {"lookahead": -1}])
def test_wrong_groups_raise(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"BlockGroup: {name}="):
        BlockGroup(**wrong)
    with pytest.raises(ValueError, match=f"BlockGroup: {name} is of type float"):
        BlockGroup(**dict[str, Any]({name: 1.5}))
