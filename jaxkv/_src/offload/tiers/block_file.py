"""A block in a file: a header of 4 KiB, the block, and zeros up to a multiple of 4 KiB.

    magic, version, lengths of the key and of the block, CRC-32 of the block (32 bytes in all)
    key, CRC-32 of all that precedes, zeros (4 KiB in all)

The header is a function of key, size and checksum: a reader makes it from the bytes that it has
read and compares all 4 KiB. A file is written under a temporary name and renamed, and never changed
afterwards. Nothing is synced: after a power failure a file may have any length and content, and
the comparison rejects it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import zlib

import numpy as np

from jaxkv._src.offload.integers import checked_integer

ALIGNMENT = 4096  # of O_DIRECT: addresses, lengths and offsets, on every device
_MAX_BLOCK_BYTES = 1 << 30  # one preadv or pwritev transfers at most 2 GiB - 4 KiB
_MAGIC, _VERSION = b"jaxkvblk", 1
_FIXED = struct.Struct("<8sIIQI4x")
_CRC = struct.Struct("<I")
# O_NONBLOCK: the open of a FIFO in the place of a file would wait for its writer.
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def checked_block_bytes(name: str, block_bytes: int) -> int:
    expected = f"an integer from 1 to {_MAX_BLOCK_BYTES}"
    return checked_integer(f"{name}: block_bytes", block_bytes, expected, 1, _MAX_BLOCK_BYTES)


def file_bytes(block_bytes: int) -> int:
    """Size of the file of a block."""
    return ALIGNMENT + block_bytes + -block_bytes % ALIGNMENT


def header(key: bytes, block: memoryview) -> bytes:
    head = _FIXED.pack(_MAGIC, _VERSION, len(key), len(block), zlib.crc32(block)) + key
    head += _CRC.pack(zlib.crc32(head))
    return head + bytes(ALIGNMENT - len(head))


class Scratch:
    """Aligned memory of one thread: a header, and a block for buffers that are not aligned."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.file = memoryview(mmap.mmap(-1, file_bytes(block_bytes)))
        self.header = self.file[:ALIGNMENT]
        self.block = self.file[ALIGNMENT : ALIGNMENT + block_bytes]
        self.padding = self.file[ALIGNMENT + block_bytes :]

    def is_aligned(self, buffer: memoryview) -> bool:
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        return self._block_bytes % ALIGNMENT == 0 and address % ALIGNMENT == 0


def copy(target: memoryview, source: memoryview) -> None:
    """Without the GIL, unlike a slice assignment."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def write(
    path: str,
    temporary: str,
    key: bytes,
    block: memoryview,
    now: float,
    scratch: Scratch,
    flags: int,
) -> None:
    """Writes a file with mode 0600.

    Args:
      path: the file.
      temporary: a name that is not in use, in the same file system.
      key: the block's key.
      block: the block.
      now: time of the first use; the clock of a file system may differ from that of the process.
      scratch: memory of this thread.
      flags: O_DIRECT or 0.

    Raises:
      OSError: nothing was written, under either name.
    """
    scratch.header[:] = header(key, block)
    buffers = [scratch.header, block]
    if not scratch.is_aligned(block):
        copy(scratch.block, block)
        scratch.padding[:] = bytes(len(scratch.padding))  # what a read has left
        buffers = [scratch.file]
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
    except OSError:
        if flags:  # Linux creates the file before it refuses O_DIRECT
            remove(temporary)
        raise
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # see remove_abandoned
            written = os.pwritev(descriptor, buffers, 0)
            if written != sum(map(len, buffers)):
                raise OSError(errno.ENOSPC, f"short write of {written} bytes", temporary)
            os.utime(descriptor, (now, now))
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def read(path: str, key: bytes, into: memoryview, now: float, scratch: Scratch, flags: int) -> bool:
    """Reads a file and marks it as used `now`; False if it is not that of an intact block.

    Raises:
      OSError: the file does not exist, or cannot be read.
    """
    aligned = scratch.is_aligned(into)
    buffers = [scratch.header, into] if aligned else [scratch.file]
    descriptor = os.open(path, _TO_READ | flags)
    try:
        if os.preadv(descriptor, buffers, 0) != sum(map(len, buffers)):
            return False
        block = into if aligned else scratch.block
        if scratch.header != header(key, block) or any(scratch.padding):
            return False
        with contextlib.suppress(OSError):  # read-only, or of another user: intact all the same
            os.utime(descriptor, (now, now))
    finally:
        os.close(descriptor)
    if not aligned:
        copy(into, scratch.block)
    return True


def use(path: str, num_bytes: int, now: float) -> bool:
    """Marks a file as used `now`; False if it is not a file of this size, or does not exist."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
        return False
    with contextlib.suppress(OSError):  # as in `read`
        os.utime(path, (now, now), follow_symlinks=False)
    return True


def unlink(path: str) -> None:
    """Removes a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove(path: str) -> bool:
    """Removes a file; False if it cannot be removed, or does not exist."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def remove_abandoned(directory: str) -> None:
    """Removes the temporary files of processes that are gone: those that nobody has locked."""
    for entry in os.scandir(directory):
        try:
            descriptor = os.open(entry.path, _TO_READ)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(entry.path)
        except OSError:
            pass  # in use
        finally:
            os.close(descriptor)
