"""Several tiers as one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxkv._src.offload.tiers.queued import LOGGER
from jaxkv._src.offload.tiers.tier import Tier


class TieredStore:
    """Tiers in the order in which they are read; a `Tier` itself.

    A read asks the tiers in order until one returns the block; a write goes to all, and succeeds if
    one has stored it. A block read from a later tier is not written to earlier ones. The
    counterpart of vLLM's tiering manager.

        store = jaxkv.offload.TieredStore([fast, large])

    Args:
      tiers: at least one; `close` closes them.

    Raises:
      TypeError: `tiers` is not a sequence of tiers.
      ValueError: there is no tier, or they have different `block_bytes`.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = _checked("TieredStore", tiers)
        sizes = {tier.block_bytes for tier in self._tiers}
        if len(sizes) != 1:
            raise ValueError(
                f"TieredStore: {len(self._tiers)} tiers with block_bytes {sorted(sizes)}; pass at "
                "least one, and all of one size"
            )

    @property
    def block_bytes(self) -> int:
        """See `Tier`."""
        return self._tiers[0].block_bytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`; asks each tier for those that the earlier ones have not."""
        found = [False] * len(keys)
        for tier in self._tiers:
            missing = [i for i, there in enumerate(found) if not there]
            if missing:
                answers = tier.contains([keys[i] for i in missing])
                for i, there in zip(missing, answers, strict=True):
                    found[i] = there
        return found

    def read(self, key: bytes, into: memoryview) -> Future[bool]:
        """See `Tier`; raises a ValueError only if no tier accepts the read."""
        result: Future[bool] = Future()
        result.set_running_or_notify_cancel()
        tiers, errors = iter(self._tiers), []

        def ask() -> bool:
            for tier in tiers:
                try:
                    tier.read(key, into).add_done_callback(answer)
                    return True
                except ValueError as error:  # closed; a later tier may have the block
                    errors.append(error)
            return False

        def answer(done: Future[bool]) -> None:
            try:
                found = done.result()
                is_over = found or not ask()
            except Exception:  # of any type: a future that never ends would hold its page
                LOGGER.exception("TieredStore: read failed, as a miss")
                found, is_over = False, True
            if is_over:
                result.set_result(found)

        if not ask():
            raise errors[-1]
        return result

    def write(self, key: bytes, block: memoryview) -> Future[bool]:
        """See `Tier`; the future is done when all tiers are."""
        writes: list[Future[bool]] = []
        for tier in self._tiers:
            try:
                writes.append(tier.write(key, block))
            except ValueError:  # closed; the block belongs to the tiers that took it
                if not writes and tier is self._tiers[-1]:
                    raise
        result: Future[bool] = Future()
        result.set_running_or_notify_cancel()
        lock = threading.Lock()
        stored: list[bool] = []

        def answer(done: Future[bool]) -> None:
            with lock:
                stored.append(done.result())
                last = len(stored) == len(writes)
            if last:
                result.set_result(any(stored))

        for write in writes:
            write.add_done_callback(answer)
        return result

    def remove(self, keys: Iterable[bytes]) -> None:
        """See `Tier`; an exception of one tier is raised once the others have removed the blocks.

        That of a tier that fails is raised rather than that of one that is closed, and finds
        nothing.
        """
        keys = tuple(keys)
        failed: Exception | None = None
        for tier in self._tiers:
            try:
                tier.remove(keys)
            except Exception as error:  # of any type; no tier may keep blocks that are not trusted
                LOGGER.exception("TieredStore: remove failed in a %s", type(tier).__name__)
                if failed is None or isinstance(failed, ValueError):
                    failed = error
        if failed:
            raise failed

    def metrics(self) -> dict[str, float]:
        """The metrics of tier i, with the suffix `_i`."""
        return {
            f"{name}_{i}": value
            for i, tier in enumerate(self._tiers)
            for name, value in tier.metrics().items()
        }

    def close(self) -> None:
        """See `Tier`."""
        for tier in self._tiers:
            tier.close()


def one_tier(operation: str, tiers: Any) -> Tier:
    """A tier, or several as a `TieredStore`; raises TypeError for anything else."""
    found = _checked(operation, tiers)
    return found[0] if len(found) == 1 else TieredStore(found)


def _checked(operation: str, tiers: Any) -> tuple[Tier, ...]:
    """Raises TypeError unless they are objects with `block_bytes`."""
    found = tuple(tiers) if isinstance(tiers, Iterable) else (None,)
    if not all(hasattr(tier, "block_bytes") for tier in found):
        raise TypeError(
            f"{operation}: tiers={tiers!r:.60} has to be a sequence of tiers, such as [tier]"
        )
    return found
