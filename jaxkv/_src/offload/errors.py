"""Exceptions of the offload manager."""


class OffloadError(Exception):
    """A call that the state of an `OffloadManager` does not allow; it has changed nothing."""


class BlockNotReadyError(OffloadError, LookupError):
    """A block to load is not stored, or its store is not complete; raised by `prepare_load`."""


class StaleSpecError(OffloadError, RuntimeError):
    """A spec that is not in flight, or one of whose blocks has been discarded.

    Raised by `start`, `complete` and `abort` of `OffloadManager`; the message has the reason.
    """
