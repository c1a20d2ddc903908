"""A tier in a Mooncake Store, shared by the machines of a fleet."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxkv._src.offload.integers import checked_integer
from jaxkv._src.offload.tiers import block_file
from jaxkv._src.offload.tiers.queued import Copy, QueuedTier

_MAX_BATCH = 8  # blocks of one call, which has staging memory for all of them
_CONTAINS_WITHIN_S = 0.1
_MAX_NAMES = 4096  # of one question: a healthy master answers it in a fraction of this time
_RETRY_AFTER_S = 5.0
_NO_SERVER = "P2PHANDSHAKE"  # in place of the URL: clients ask each other
_SCHEMES = ("http", "https", "etcd", "redis")  # of Mooncake's builds; that on PyPI lacks redis
# Results of Mooncake's calls.
_NOT_FOUND = -704
_NO_ANSWER = (-900, -901)  # the master is not reachable; it has not answered in time


class MooncakeTier(QueuedTier):
    """Blocks in a Mooncake Store; a `Tier`.

    The store keeps blocks in memory that its clients lend, on any number of machines, so that
    engines find the prefixes of one another. Its master is a separate process:

        mooncake_master --enable_http_metadata_server=true

        tier = jaxkv.offload.MooncakeTier(
            block_bytes=1 << 20,
            host="10.0.0.7",
            master="10.0.0.1:50051",
            metadata="http://10.0.0.1:8080/metadata",
            segment_bytes=64 << 30,
        )

    An object has a header with key, size and CRC-32 of its block, which is compared after each
    read. Blocks pass through registered memory of the tier: a transfer that has timed out may
    still write to its memory, which therefore is never a page of the caller.

    While the master does not answer, copies miss immediately, except one attempt every 5 s; the
    client reconnects by itself once it is back. A master that restarts has forgotten all blocks.
    `contains` waits at most 0.1 s for the master: blocks without an answer by then are misses.

    The counterpart of the Mooncake backends of SGLang's HiCache and of LMCache. Needs Mooncake:
    `pip install 'jaxkv[mooncake]'`, and libibverbs (Debian: libibverbs1).

    Args:
      block_bytes: size of every block in bytes, at most 1 GiB.
      host: address of this machine for the other clients.
      master: address and port of the master.
      metadata: URL of the metadata server, `http://HOST:PORT/metadata` or `etcd://HOST:PORT`; or
        "P2PHANDSHAKE" without one.
      segment_bytes: bytes of memory that this process lends to the store; 0: none. The store
        evicts by its own rules.
      protocol: "tcp" or "rdma".
      devices: names of RDMA devices, separated by commas; "" for all of them.
      num_threads: number of calls that run at the same time, of up to 8 blocks each.

    Raises:
      ImportError: Mooncake or libibverbs is not installed.
      ConnectionError: the master or the metadata server does not answer; Mooncake tries for 90 s.
      ValueError: a number is not an integer, or is out of range; `metadata` is neither.
    """

    def __init__(
        self,
        block_bytes: int,
        *,
        host: str,
        master: str,
        metadata: str,
        segment_bytes: int = 0,
        protocol: str = "tcp",
        devices: str = "",
        num_threads: int = 4,
    ) -> None:
        block_bytes = block_file.checked_block_bytes("MooncakeTier", block_bytes)
        expected = "an integer, at least 0 bytes"
        segment_bytes = checked_integer("MooncakeTier: segment_bytes", segment_bytes, expected, 0)
        scheme, is_url, _ = metadata.partition("://")
        # Mooncake takes HOST:PORT as etcd, for minutes, and ends the process at other schemes.
        if metadata != _NO_SERVER and not (is_url and scheme in _SCHEMES):
            where = metadata if metadata and not is_url else "HOST:PORT"
            raise ValueError(
                f"MooncakeTier: metadata={metadata!r} is not a URL of a metadata server; pass "
                f"'http://{where}/metadata' for that of mooncake_master, 'etcd://{where}' for "
                f"etcd, or {_NO_SERVER!r} for none"
            )
        super().__init__("MooncakeTier", block_bytes, num_threads, _MAX_BATCH)
        self._object_bytes = block_file.ALIGNMENT + block_bytes
        self._store = _client(host, metadata, segment_bytes, protocol, devices, master)
        self._retry_at = self._remove_at = 0.0  # of all calls but removals, of removals
        self._staging = threading.local()
        self._start()

    def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks the master, for at most 0.1 s; what it has not answered by then is a miss."""
        answers: list[int] = []
        if keys and self._answers():
            expires_at = time.monotonic() + _CONTAINS_WITHIN_S
            arguments = keys, expires_at, answers
            thread = threading.Thread(target=self._ask, args=arguments, daemon=True)
            thread.start()
            thread.join(_CONTAINS_WITHIN_S)  # if the master hangs, it ends by itself, later
            answers = [*answers]
            self._check("contains", answers or [_NO_ANSWER[-1]])
        return [answer == 1 for answer in answers] + [False] * (len(keys) - len(answers))

    def _ask(self, keys: Sequence[bytes], expires_at: float, answers: list[int]) -> None:
        """Appends the answers of the master for the first keys, until the time limit."""
        for first in range(0, len(keys), _MAX_NAMES):
            if time.monotonic() < expires_at:
                names = [self._object_name(key) for key in keys[first : first + _MAX_NAMES]]
                answers += self._store.batch_is_exist(names)

    def remove(self, keys: Iterable[bytes]) -> None:
        """See `Tier`; asks the master in the caller's thread, also if `contains` had no answer.

        Raises:
          ValueError: the tier is closed, this is the child of a fork, or as for `Tier.contains`.
          OSError: the master does not answer, or cannot remove a block, which is then still found.
            The others are removed. Without an answer, the master is not asked again for 5 s.
        """
        keys = tuple(keys)
        self._check_keys("remove", keys)
        self._check_open("remove")
        if self._is_child:
            raise ValueError("MooncakeTier.remove: the child of a fork has no connection")
        if not keys:
            return
        # Not `_answers`: a lookup that was too slow is no reason to keep blocks.
        if time.monotonic() < self._remove_at or self._store.health_check():
            silent = ConnectionError("the master does not answer")
            self._failed("remove", silent)
            raise silent
        names = [self._object_name(key) for key in keys]
        if error := self._check("remove", self._store.batch_remove(names, True)):
            if error.errno in _NO_ANSWER:
                self._remove_at = self._retry_at
            raise error

    def close(self) -> None:
        """See `Tier`; the blocks in the memory of this process are lost to the others."""
        super().close()
        if not self._is_stuck() and not self._is_child:  # the memory lent is that of the parent
            self._store.close()

    def _read(self, copies: Sequence[Copy]) -> list[bool]:
        if not self._answers():
            return [False] * len(copies)
        objects = self._objects(len(copies))
        results = self._store.batch_get_into(*self._arguments(copies, objects))
        self._check("read", results)
        return [
            result == self._object_bytes and self._take(copy, one)
            for result, copy, one in zip(results, copies, objects, strict=True)
        ]

    def _take(self, copy: Copy, staged: memoryview) -> bool:
        """Copies a block to its buffer, and checks it there."""
        block_file.copy(copy.buffer, staged[block_file.ALIGNMENT :])
        if staged[: block_file.ALIGNMENT] == block_file.header(copy.key, copy.buffer):
            return True
        self._count("corrupt_blocks")
        self._warn("corrupt", f"block {copy.key.hex()} was changed in the store: a miss")
        self._check("remove", self._store.batch_remove([self._object_name(copy.key)], True))
        return False

    def _write(self, copies: Sequence[Copy]) -> list[bool]:
        if not self._answers():
            return [False] * len(copies)
        objects = self._objects(len(copies))
        for copy, staged in zip(copies, objects, strict=True):
            block_file.copy(staged[block_file.ALIGNMENT :], copy.buffer)
            staged[: block_file.ALIGNMENT] = block_file.header(copy.key, copy.buffer)
        results = self._store.batch_put_from(*self._arguments(copies, objects))
        self._check("write", results)
        return [result == 0 for result in results]

    def _arguments(
        self, copies: Sequence[Copy], objects: Sequence[memoryview]
    ) -> tuple[list[str], list[int], list[int]]:
        names = [self._object_name(copy.key) for copy in copies]
        return names, [_address(one) for one in objects], [self._object_bytes] * len(objects)

    def _object_name(self, key: bytes) -> str:
        return f"jaxkv/1/{self._block_bytes}/{key.hex()}"

    def _objects(self, number: int) -> list[memoryview]:
        """Registered memory of this thread, for a header and a block each."""
        size = block_file.file_bytes(self._block_bytes)
        memory = getattr(self._staging, "memory", None)
        if memory is None:
            memory = memoryview(mmap.mmap(-1, _MAX_BATCH * size))
            result = self._store.register_buffer(_address(memory), len(memory))
            if result:
                raise OSError(f"Mooncake refused {len(memory)} bytes of memory: error {result}")
            self._staging.memory = memory
        return [memory[i * size : i * size + self._object_bytes] for i in range(number)]

    def _answers(self) -> bool:
        return time.monotonic() >= self._retry_at and self._store.health_check() == 0

    def _check(self, operation: str, results: Sequence[int]) -> OSError | None:
        """Counts failures other than misses; without an answer, does not ask for a while.

        Returns:
          One of them, that there was no answer rather than another.
        """
        failed: OSError | None = None
        codes = {result for result in results if result < 0} - {_NOT_FOUND}
        for code in sorted(codes, key=_NO_ANSWER.__contains__):
            if code in _NO_ANSWER:
                self._retry_at = time.monotonic() + _RETRY_AFTER_S
            failed = OSError(code, f"error {code} of Mooncake")
            self._failed(operation, failed)
        return failed


def _client(
    host: str, metadata: str, segment_bytes: int, protocol: str, devices: str, master: str
) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ImportError(
            f"MooncakeTier: {error}; pip install jaxkv[mooncake], and libibverbs (Debian: "
            "libibverbs1)"
        ) from error
    store = MooncakeDistributedStore()
    result = store.setup(host, metadata, segment_bytes, 0, protocol, devices, master)
    if result:
        raise ConnectionError(
            f"MooncakeTier: error {result} of Mooncake for host={host!r}, master={master!r}, "
            f"metadata={metadata!r}, segment_bytes={segment_bytes}, protocol={protocol!r}: is the "
            "master running there, with --enable_http_metadata_server=true?"
        )
    return store


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
