"""The blocks of a directory, in the order of their last use."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from jaxkv._src.offload.tiers import block_file

_SUFFIX = ".kv"
_FANOUT = 256
_TEMPORARY = "tmp"
# A change within the resolution of a directory's time of modification leaves it as it is.
_SETTLED_S = 2.0


class FileIndex:
    """Keys of the files below a directory, oldest use first. Thread-safe.

    Other processes may write, use and remove files too: `refresh` finds what they wrote and
    removed, `take_oldest` respects what they used. The time of use is that of modification.

    Raises:
      OSError: the directory cannot be created or read.
      PermissionError: others can write to it, or it belongs to another user.
    """

    def __init__(self, directory: str, file_bytes: int) -> None:
        self.directory = directory
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        self._used: OrderedDict[bytes, float] = OrderedDict()
        self._unchanged: dict[str, float] = {}  # time of modification of directories read
        for folder in (os.path.dirname(directory), directory):  # only the last one gets the mode
            os.makedirs(folder, mode=0o700, exist_ok=True)
        check_private(directory)
        self._folders = [os.path.join(directory, f"{i:02x}") for i in range(_FANOUT)]
        for folder in (self.temporary, *self._folders):
            _make(folder)

    def after_fork(self) -> None:
        """In the child of a fork: a thread that it does not have may have held the lock."""
        self._lock = threading.Lock()

    def path(self, key: bytes) -> str:
        name = key.hex()
        return os.path.join(self.directory, name[:2], name + _SUFFIX)

    @property
    def temporary(self) -> str:
        return os.path.join(self.directory, _TEMPORARY)

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: object) -> bool:
        return key in self._used

    def use(self, key: bytes, now: float) -> None:
        """Inserts a key whose file was used `now`, or makes it the most recent one."""
        with self._lock:
            self._used[key] = now
            self._used.move_to_end(key)

    def drop(self, key: bytes) -> bool:
        """Whether the index had the key. `refresh` finds it again if its file is still there."""
        with self._lock:
            return self._pop(key) is not None

    def _pop(self, key: bytes) -> float | None:
        """With the lock held."""
        self._unchanged.pop(os.path.dirname(self.path(key)), None)
        return self._used.pop(key, None)

    def take_oldest(self) -> bytes | None:
        """Takes the key of the oldest file out of the index, as `drop`; None if there is none."""
        while True:
            with self._lock:
                key, known = next(iter(self._used.items()), (b"", 0.0))
                if not key:
                    return None
                self._pop(key)
            try:
                used = os.stat(self.path(key)).st_mtime
            except OSError:
                used = known
            if used <= known + 1e-3:
                return key
            with self._lock:  # used by another process meanwhile
                self._used.setdefault(key, used)

    def refresh(self) -> None:
        """Reads the directories that have changed since the last call; makes those that are gone.

        Raises:
          OSError: a directory cannot be read or made. The others have been read.
        """
        added: list[tuple[float, bytes]] = []
        known: list[set[bytes]] = [set() for _ in range(_FANOUT)]
        with self._lock:
            for key in self._used:
                known[key[0]].add(key)
        failed: OSError | None = None
        for folder, before in ((self.temporary, None), *zip(self._folders, known, strict=True)):
            try:
                _make(folder)
                if before is not None:
                    added += self._added(folder, before)
            except OSError as error:
                self._unchanged.pop(folder, None)
                failed = error
        with self._lock:
            for used, key in sorted(added):
                self._used.setdefault(key, used)
        if failed:
            raise failed

    def _added(self, folder: str, before: set[bytes]) -> list[tuple[float, bytes]]:
        """New files of a directory, with their times of use; drops those of `before` now gone."""
        modified = os.stat(folder).st_mtime
        if self._unchanged.get(folder) == modified:
            return []
        if time.time() - modified > _SETTLED_S:
            self._unchanged[folder] = modified  # now: a drop while the directory is read clears it
        added, found = [], set()
        for key, entry in self._files(folder):
            found.add(key)
            if key not in self._used and (used := self._time_of_use(entry)) is not None:
                added.append((used, key))
        for key in before - found:
            self.drop(key)
        return added

    def _files(self, folder: str) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(_SUFFIX)
                try:
                    key = bytes.fromhex(name)
                except ValueError:
                    continue
                if entry.name == key.hex() + _SUFFIX and name[:2] == os.path.basename(folder):
                    yield key, entry

    def _time_of_use(self, entry: os.DirEntry[str]) -> float | None:
        """None, and the file is removed, if it has not the size of a block's file."""
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return None
        if status.st_size == self._file_bytes:
            return status.st_mtime
        block_file.remove(entry.path)
        return None


def _make(folder: str) -> None:
    """Makes a folder, but not the one that it is in, which may be an unmounted file system."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


def check_private(directory: str) -> None:
    status = os.stat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{directory!r} belongs to user {status.st_uid}, with mode "
            f"{status.st_mode & 0o777:o}: others could replace blocks; use a directory of this "
            "user, with mode 700"
        )
