"""Objects of shared pools, without a pool."""

import os
import uuid

import pytest

from jaxkv._src.cache import shared_memory
from tests.util.shared_memory import needs_shared_memory

pytestmark = needs_shared_memory


def test_object_is_incomplete_until_its_creation_ends():
    name = f"test-{uuid.uuid4().hex}"
    shared = shared_memory.SharedPool(name, {"layout": "page_first"})
    with shared.opened(0, 4096, {}) as (fd, existed):
        assert not existed and os.pread(fd, 64, 0) == bytes(64)
        with pytest.raises(ValueError, match="not a complete pool"):
            shared_memory.identity(name)
    assert shared_memory.identity(name)
    shared_memory.unlink(name)
