"""Exceptions of the offload manager."""


class OffloadError(Exception):
    """A call that the state of an `OffloadManager` does not allow; it has changed nothing."""


class BlockNotReadyError(OffloadError, LookupError):
    """A block to load is not stored, or its store is not complete."""


class StaleSpecError(OffloadError, RuntimeError):
    """A spec that is no longer in flight, or whose pages have been discarded meanwhile."""
