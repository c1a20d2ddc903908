"""POSIX shared memory that outlives the process: creation, checks on attach, removal.

A pool has one object for each distinct shard, `/dev/shm/jaxkv.NAME.0` and so on: a header in the
first page, then at `_ext.FILE_OFFSET` the pages. The first word of the header is written last, and
the creator holds a lock on the object until then. An object without this word whose lock is free
belongs to a process that was killed: it has no contents yet, and is initialized again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxkv._src.runtime import native

DIRECTORY = Path("/dev/shm")
_MAX_NAME = 200  # of NAME_MAX, 255
_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{_MAX_NAME - 1}}}")
_MAGIC = b"jaxkv-kv"
_VERSION = 2  # to be changed with the description
_HEADER = struct.Struct("=8sII16s")  # magic, version, bytes of the description, identity
_MAX_DESCRIPTION = mmap.PAGESIZE - _HEADER.size
_MAX_VALUE = 200  # characters of a value in the description; longer ones are hashed
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO does not wait
_SECONDS, _SECONDS_PER_GIB = 30, 1  # limit of a wait for another process that creates the object


@dataclasses.dataclass(frozen=True)
class SharedPool:
    """The objects of a pool.

    Attributes:
      name: name of the pool.
      description: what must be equal on attach, by the name of the argument.
    """

    name: str
    description: dict[str, str]

    def __post_init__(self) -> None:
        check_name(self.name, "create")

    def missing_bytes(self, parts: Sequence[int], part_bytes: int) -> int:
        """Bytes that `opened` will allocate for these parts."""
        return sum(max(_size(part_bytes) - _kept(_path(self.name, part)), 0) for part in parts)

    @contextlib.contextmanager
    def opened(
        self, part: int, part_bytes: int, description: dict[str, str], num_parts: int = 1
    ) -> Iterator[tuple[int, bool]]:
        """The file descriptor of a part, and whether it existed; otherwise it is created.

        A new part is complete, hence attachable, once the context ends without an exception. It is
        waited for as long as another process may take for all `num_parts`.
        """
        expected = {key: _short(value) for key, value in (self.description | description).items()}
        path = _path(self.name, part)
        fd = self._locked(path, part_bytes * num_parts)
        try:
            if os.pread(fd, len(_MAGIC), 0).strip(b"\0"):
                fcntl.flock(fd, fcntl.LOCK_UN)  # several processes attach at the same time
                self._check(fd, path, part_bytes, expected)
                yield fd, True
                return
            try:
                os.ftruncate(fd, 0)  # of a process that was killed
                os.ftruncate(fd, _size(part_bytes))
                yield fd, False
                _write_header(fd, expected)
            except BaseException:
                _remove(fd, path)
                raise
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a mapping would keep it
            os.close(fd)

    def _locked(self, path: Path, pool_bytes: int) -> int:
        """An open object that nobody is creating."""
        seconds = _SECONDS + _SECONDS_PER_GIB * pool_bytes / 2**30
        deadline = time.monotonic() + seconds
        while True:
            fd = _open(path)
            try:
                _check_owner(fd, path, "create")
                if _lock(fd, deadline):
                    if os.fstat(fd).st_nlink:
                        return fd
                elif time.monotonic() > deadline:
                    raise TimeoutError(
                        f"HostPool.create: another process has been creating {path} for "
                        f"{seconds:.0f} s: wait for it, or end it and call "
                        f"HostPool.unlink({self.name!r})"
                    )
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # removed meanwhile

    def _check(self, fd: int, path: Path, part_bytes: int, expected: dict[str, str]) -> None:
        """Raises a ValueError unless the object is that of an equal pool."""
        header = _read_header(fd, path, "create")
        found = {"format": str(header.version)}
        want = {"format": str(_VERSION)}
        if header.version == _VERSION:
            found |= header.description | {"size in bytes": str(os.fstat(fd).st_size)}
            want |= expected | {"size in bytes": str(_size(part_bytes))}
        for key in want | found:
            if found.get(key) != want.get(key):
                raise ValueError(
                    f"HostPool.create: shared={self.name!r}: {path} has {key} {found.get(key)}, "
                    f"expected {want.get(key)}: pass the arguments with which it was created, "
                    f"choose another name, or remove it with HostPool.unlink({self.name!r})"
                )


def check_name(name: object, operation: str) -> None:
    """Raises a ValueError unless `name` can be that of a pool."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"HostPool.{operation}: the name of a shared pool must consist of 1 to {_MAX_NAME} "
            f"letters, digits, '_', '-' or '.', without '.' at the beginning, got {name!r}"
        )


def unlink(name: str) -> None:
    """Removes the objects of a pool.

    Raises:
      ValueError: not a name.
      FileNotFoundError: there is no such pool.
    """
    check_name(name, "unlink")
    for path in _paths(name, "unlink"):
        path.unlink(missing_ok=True)


def identity(name: str) -> str:
    """A digest of random numbers that the objects of a pool were given when they were created.

    Raises:
      ValueError: not a name, or an object of this name is incomplete or not of a pool.
      FileNotFoundError: there is no such pool.
      PermissionError: an object is not a file of this user with mode 0600.
    """
    check_name(name, "shared_id")
    digest = hashlib.sha256()
    for path in _paths(name, "shared_id"):
        fd = _open_existing(path, os.O_RDONLY, "shared_id")
        try:
            _check_owner(fd, path, "shared_id")
            digest.update(path.name.encode() + _read_header(fd, path, "shared_id").identity)
        finally:
            os.close(fd)
    return digest.hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class _Header:
    version: int
    identity: bytes
    description: dict[str, str]


def _write_header(fd: int, description: dict[str, str]) -> None:
    text = json.dumps(description).encode()
    if len(text) > _MAX_DESCRIPTION:
        raise ValueError(f"description of {len(text)} bytes, the limit is {_MAX_DESCRIPTION} bytes")
    header = _HEADER.pack(_MAGIC, _VERSION, len(text), uuid.uuid4().bytes) + text
    os.pwrite(fd, header[len(_MAGIC) :], len(_MAGIC))
    os.pwrite(fd, _MAGIC, 0)  # last: the object is complete


def _read_header(fd: int, path: Path, operation: str) -> _Header:
    first = os.pread(fd, mmap.PAGESIZE, 0)
    if len(first) < _HEADER.size or first[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"HostPool.{operation}: {path} begins with {first[: len(_MAGIC)]!r}, expected "
            f"{_MAGIC!r}: not a complete pool of jaxkv; choose another name, or remove the file"
        )
    _, version, size, number = _HEADER.unpack_from(first)
    if version != _VERSION:
        return _Header(version, number, {})
    text = first[_HEADER.size : _HEADER.size + size]
    try:
        description = json.loads(text)
    except ValueError:  # not JSON, or not UTF-8
        description = None
    if not isinstance(description, dict):
        raise ValueError(
            f"HostPool.{operation}: {path} has a damaged header, its description must be a JSON "
            f"object, got {text[:80]!r}; choose another name, or remove the file"
        )
    return _Header(version, number, description)


def _open(path: Path) -> int:
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            return _open_existing(path, os.O_RDWR, "create")


def _open_existing(path: Path, access: int, operation: str) -> int:
    try:
        return os.open(path, access | _FLAGS)
    except OSError as error:
        others = errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO
        if error.errno not in others:
            raise
        raise _not_ours(path, os.lstat(path), operation) from error


def _remove(fd: int, path: Path) -> None:
    """Removes the object, unless it was removed, after which another process may have its own."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            path.unlink()


def _check_owner(fd: int, path: Path, operation: str) -> None:
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode != 0o600:
        raise _not_ours(path, status, operation)


def _not_ours(path: Path, status: os.stat_result, operation: str) -> PermissionError:
    return PermissionError(
        f"HostPool.{operation}: {path} has owner {status.st_uid} and mode "
        f"{stat.filemode(status.st_mode)}, expected owner {os.geteuid()} (this process) and "
        "-rw-------: others could read or change the pages; choose another name, or remove the file"
    )


def _lock(fd: int, deadline: float) -> bool:
    """Whether the lock was taken before the deadline."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)


def _kept(path: Path) -> int:
    """Bytes of an object that need not be allocated again."""
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:  # absent, or rejected when it is opened
        return 0
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return 0
        return status.st_size if os.pread(fd, 1, 0).strip(b"\0") else 512 * status.st_blocks
    finally:
        os.close(fd)


def _path(name: str, part: int) -> Path:
    return DIRECTORY / f"jaxkv.{name}.{part}"


def _paths(name: str, operation: str) -> list[Path]:
    found = [path for path in DIRECTORY.glob(f"jaxkv.{name}.*") if path.suffix[1:].isdecimal()]
    found = [path for path in found if path.stem == f"jaxkv.{name}"]
    if not found:
        raise FileNotFoundError(
            f"HostPool.{operation}: no shared pool {name!r}, of which {_path(name, 0)} is the "
            "first object"
        )
    return sorted(found)


def _size(part_bytes: int) -> int:
    """Size of the object of a part."""
    pages = -(-max(part_bytes, 1) // mmap.PAGESIZE)
    return native.extension().FILE_OFFSET + pages * mmap.PAGESIZE


def _short(value: str) -> str:
    if len(value) <= _MAX_VALUE:
        return value
    return f"sha256 {hashlib.sha256(value.encode()).hexdigest()}"
