"""A `SymmetricMemory` is the only owner of its memory."""

import copy
import pickle

import pytest

from tests.util.ranks import memory_of

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_memory_cannot_be_copied(duplicate):
    """Closing a copy would free the memory of the original."""
    with memory_of(2) as memory:
        with pytest.raises(TypeError, match="SymmetricMemory cannot be copied or pickled"):
            duplicate(memory)
        memory.check_errors()
