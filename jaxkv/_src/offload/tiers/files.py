"""A tier of local files."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from jaxkv._src.offload.integers import checked_integer
from jaxkv._src.offload.tiers import block_file
from jaxkv._src.offload.tiers.file_index import FileIndex
from jaxkv._src.offload.tiers.queued import LOGGER, Copy, QueuedTier

_REFRESH_EVERY_S = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_T = TypeVar("_T")


class FileTier(QueuedTier):
    """Blocks in files of a local directory, one file for each; a `Tier`.

    The counterpart of LMCache's local disk backend and of the file backend of SGLang's HiCache.

    A file has a header with key, size and CRC-32 of the block; it is written under a temporary name
    and renamed. A file that is truncated, torn or changed is a miss and is removed. Files outlive
    the process, and several processes may share a directory. I/O bypasses the page cache (O_DIRECT)
    where the file system allows, without a copy if `block_bytes` and the addresses of the buffers
    are multiples of 4 KiB. No file is synced: a power failure may lose blocks, never change them.

        tier = jaxkv.offload.FileTier("/var/cache/kv", block_bytes=1 << 20, capacity_bytes=1 << 40)

    Args:
      directory: is created if necessary, with mode 0700; tiers of another `block_bytes` in the same
        directory use other files.
      block_bytes: size of every block in bytes, at most 1 GiB.
      capacity_bytes: limit in bytes of all files, each of a header of 4 KiB and a block rounded up
        to 4 KiB; the least recently used ones are evicted. A process notices the files of others
        every 10 s.
      num_threads: number of copies that run at the same time, at most one for each block of the
        capacity.

    Raises:
      ValueError: a number is not an integer, or is out of range.
      OSError: the directory cannot be created or read; `PermissionError` if the folder in it that
        has the files belongs to another user, or others can write to it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        block_bytes: int,
        capacity_bytes: int,
        *,
        num_threads: int = 8,
    ) -> None:
        block_bytes = block_file.checked_block_bytes("FileTier", block_bytes)
        file_bytes = block_file.file_bytes(block_bytes)
        expected = f"an integer, at least the {file_bytes} bytes of a file"
        name = "FileTier: capacity_bytes"
        capacity_bytes = checked_integer(name, capacity_bytes, expected, file_bytes)
        super().__init__("FileTier", block_bytes, num_threads)
        self._file_bytes = file_bytes
        self.capacity_blocks = capacity_bytes // file_bytes
        del self._threads[self.capacity_blocks :]  # each may be writing a file
        self._index = FileIndex(os.path.join(directory, f"v1-{block_bytes}"), file_bytes)
        self._flags = os.O_DIRECT
        self._scratch = threading.local()
        self._temporary_names = itertools.count()
        self._process = secrets.token_hex(8)  # process ids repeat among containers
        self._being_written = 0
        self._room = threading.Lock()
        block_file.remove_abandoned(self._index.temporary)
        self._index.refresh()
        self._evict(0)
        self._start()
        self._stop = threading.Event()
        self._refresher = threading.Thread(
            target=self._refresh, name="jaxkv-FileTier-refresh", daemon=True
        )
        self._refresher.start()

    def remove(self, keys: Iterable[bytes]) -> None:
        """See `Tier`; removes the files in the caller's thread, also after `close`.

        Raises:
          ValueError: as for `Tier.contains`.
          OSError: a file cannot be removed, so that its block is still found. The others are.
        """
        keys = tuple(keys)
        self._check_keys("remove", keys)
        remaining: OSError | None = None
        for key in keys:
            self._index.drop(key)
            try:
                block_file.unlink(self._index.path(key))
            except OSError as error:
                self._failed("remove", error)
                remaining = error
        if remaining:
            raise remaining

    def close(self) -> None:
        """See `Tier`."""
        super().close()
        self._stop.set()

    def _after_fork(self) -> None:
        super()._after_fork()
        self._index.after_fork()
        self._stop = threading.Event()

    def _gauges(self) -> dict[str, float]:
        return {
            "kv_offload_tier_blocks": len(self._index),
            "kv_offload_tier_usage_perc": len(self._index) / self.capacity_blocks,
        }

    def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Reads the index in memory."""
        return [key in self._index for key in keys]

    def _read(self, copies: Sequence[Copy]) -> list[bool]:
        return [self._read_block(copy) for copy in copies]

    def _write(self, copies: Sequence[Copy]) -> list[bool]:
        return [self._write_block(copy) for copy in copies]

    def _read_block(self, copy: Copy) -> bool:
        index, path, now = self._index, self._index.path(copy.key), time.time()
        try:
            intact = self._direct(block_file.read, path, copy.key, copy.buffer, now)
        except FileNotFoundError:  # evicted, perhaps by another process
            index.drop(copy.key)
            return False
        except OSError as error:
            index.drop(copy.key)
            self._failed("read", error)
            return False
        if intact:
            if copy.key in index or os.path.exists(path):  # not removed during the read
                index.use(copy.key, now)
            return True
        index.drop(copy.key)
        block_file.remove(path)
        self._count("corrupt_blocks")
        self._warn("corrupt", f"{path!r} was truncated or changed: removed, as a miss")
        return False

    def _write_block(self, copy: Copy) -> bool:
        index, path, now = self._index, self._index.path(copy.key), time.time()
        if copy.key in index:
            if block_file.use(path, self._file_bytes, now):
                index.use(copy.key, now)
                return True
            index.drop(copy.key)
        with self._room:
            self._being_written += 1
            being_written = self._being_written
        try:
            self._evict(being_written)
            self._write_file(path, copy, now)
            index.use(copy.key, now)
        except OSError as error:
            self._failed("write", error)
            return False
        finally:
            with self._room:
                self._being_written -= 1
        return True

    def _write_file(self, path: str, copy: Copy, now: float) -> None:
        """Writes a file; if the disk has less room than the capacity, in place of the oldest."""
        for may_evict in (True, False):
            name = f"{self._process}-{next(self._temporary_names)}"
            temporary = os.path.join(self._index.temporary, name)
            try:
                self._direct(block_file.write, path, temporary, copy.key, copy.buffer, now)
                return
            except OSError as error:
                if error.errno not in _FULL or not may_evict or not self._evict_one():
                    raise

    def _direct(self, operation: Callable[..., _T], *arguments: Any) -> _T:
        """Calls the operation with O_DIRECT, until the file system refuses it."""
        scratch = getattr(self._scratch, "memory", None)
        if scratch is None:
            scratch = self._scratch.memory = block_file.Scratch(self._block_bytes)
        flags = self._flags  # other threads may clear it meanwhile
        try:
            return operation(*arguments, scratch, flags)
        except OSError as error:
            if error.errno not in _NO_DIRECT or not flags:
                raise
            result = operation(*arguments, scratch, 0)
            if result is not False:  # else this path is at fault, such as that of a device
                self._flags = 0
                LOGGER.info("FileTier: %r without O_DIRECT", self._index.directory)
            return result

    def _evict(self, num_incoming: int) -> None:
        while len(self._index) + num_incoming > self.capacity_blocks and self._evict_one():
            pass

    def _evict_one(self) -> bool:
        key = self._index.take_oldest()
        if key is None:
            return False
        if block_file.remove(self._index.path(key)):
            self._count("evicted_blocks")
        return True

    def _refresh(self) -> None:
        while not self._stop.wait(_REFRESH_EVERY_S):
            try:
                self._index.refresh()
            except OSError as error:
                self._failed("refresh", error)
            self._evict(0)
