"""Whether pinned memory of the library is allocated at an address."""

import time

from jaxkv._src.runtime import native


def is_allocated(address: int) -> bool:
    return native.extension().pinned_view(address) is not None


def is_freed(address: int) -> bool:
    """XLA may release an array later, in another thread."""
    deadline = time.monotonic() + 30
    while is_allocated(address) and time.monotonic() < deadline:
        time.sleep(1e-3)
    return not is_allocated(address)
