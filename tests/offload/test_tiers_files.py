"""`FileTier`: files on this machine, whole, damaged, refused, and shared."""

import contextlib
import errno
import mmap
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxkv._src.offload.tiers import block_file, files, queued
from jaxkv.offload import FileTier, Tier
from tests.util.tier_blocks import TIMEOUT_S, all_there, content, key, read, write

pytestmark = pytest.mark.host_only

BLOCK_BYTES = 5000
FILE_BYTES = 3 * 4096


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes tiers that do not scan their directory unasked: a scan also removes damaged files."""
    monkeypatch.setattr(files, "_REFRESH_EVERY_S", 3600.0)
    tiers = []

    def make_tier(directory=tmp_path / "tier", block_bytes=BLOCK_BYTES, blocks=1000, **options):
        capacity = blocks * block_file.file_bytes(block_bytes)
        tiers.append(FileTier(directory, block_bytes, capacity, **options))
        return tiers[-1]

    yield make_tier
    for tier in tiers:
        tier.close()


def path_of(tier: FileTier, block_key: bytes) -> Path:
    return Path(tier._index.path(block_key))


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 5000, 8192])
@pytest.mark.parametrize("offset", [0, 1])
def test_blocks_survive_the_tier(make, block_bytes, offset):
    """At aligned and other addresses, with O_DIRECT and without."""
    memory = np.frombuffer(mmap.mmap(-1, 2 * 8192 + 1), np.uint8)
    block = memory[offset : offset + block_bytes]
    into = memory[8192 + offset : 8192 + offset + block_bytes]
    block[:] = np.frombuffer(content(key(0), block_bytes), np.uint8)
    tier: Tier = make(block_bytes=block_bytes)
    assert tier.contains([key(0)]) == [False]
    assert tier.write(key(0), block.data).result(TIMEOUT_S)
    tier.close()
    tier = make(block_bytes=block_bytes)
    assert tier.contains([key(0), key(1)]) == [True, False]
    assert tier.read(key(0), into.data).result(TIMEOUT_S)
    np.testing.assert_array_equal(into, block)
    assert not tier.read(key(1), into.data).result(TIMEOUT_S)
    tier.remove([key(0), key(1)])
    assert tier.contains([key(0)]) == [False] and not read(tier, key(0))


def test_files_are_private(make, tmp_path):
    previous = os.umask(0)
    try:
        tier = make()
        assert write(tier, key(0))
    finally:
        os.umask(previous)
    assert path_of(tier, key(0)).stat().st_size == FILE_BYTES
    for path in ((folder := tmp_path / "tier"), *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert not [*Path(tier._index.temporary).iterdir()]


def test_a_directory_that_others_can_write_is_refused(make, tmp_path):
    make().close()
    (tmp_path / "tier" / f"v1-{BLOCK_BYTES}").chmod(0o770)
    with pytest.raises(PermissionError, match="mode 700"):
        make()


def test_a_file_truncated_at_any_byte_is_a_miss_and_removed(make):
    tier = make(block_bytes=100)
    assert write(tier, key(0))
    path = path_of(tier, key(0))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert not read(tier, key(0)), size
        assert not path.exists()
    assert tier.metrics()["kv_offload_tier_corrupt_blocks"] == len(whole)


def test_a_file_with_any_bit_flipped_is_a_miss_and_removed(make):
    """One bit in each byte, including padding."""
    tier = make(block_bytes=100)
    assert write(tier, key(0))
    path = path_of(tier, key(0))
    whole = bytearray(path.read_bytes())
    for i in range(len(whole)):
        whole[i] ^= 1 << i % 8
        path.write_bytes(whole)
        assert not read(tier, key(0)), i
        assert not path.exists()
        whole[i] ^= 1 << i % 8
    path.write_bytes(whole)
    assert read(tier, key(0))


def test_a_damaged_file_does_not_spoil_the_next_write(make):
    tier = make(num_threads=1)
    assert write(tier, key(0))
    path = path_of(tier, key(0))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert not read(tier, key(0))
    assert write(tier, key(1)) and read(tier, key(1))


def test_a_file_of_another_key_is_a_miss(make):
    tier = make()
    assert write(tier, key(0)) and write(tier, key(1))
    path_of(tier, key(0)).replace(path_of(tier, key(1)))
    assert not read(tier, key(1))


def test_a_scan_removes_truncated_files_and_keeps_others(make):
    tier = make()
    assert write(tier, key(0)) and write(tier, key(1))
    tier.close()
    os.truncate(path_of(tier, key(0)), 4096)
    foreign = path_of(tier, key(1)).with_name("notes.txt")
    foreign.touch()
    tier = make()
    assert tier.contains([key(0), key(1)]) == [False, True]
    assert not path_of(tier, key(0)).exists() and foreign.exists()


def test_the_least_recently_used_block_is_evicted(make):
    tier = make(blocks=3)
    assert all(write(tier, key(i)) for i in range(3))
    assert read(tier, key(0))
    assert write(tier, key(1))  # there already: a use
    assert write(tier, key(3))
    assert tier.contains([key(i) for i in range(4)]) == [True, True, False, True]
    assert not path_of(tier, key(2)).exists()
    metrics = tier.metrics()
    assert metrics["kv_offload_tier_evicted_blocks"] == 1
    assert metrics["kv_offload_tier_usage_perc"] == 1
    tier.close()
    for age, i in enumerate((3, 0, 1)):  # file systems may round times
        os.utime(path_of(tier, key(i)), (1000 - age, 1000 - age))
    tier = make(blocks=2)  # the order of use outlives the process
    assert tier.contains([key(i) for i in (0, 1, 3)]) == [True, False, True]


def test_processes_share_a_directory(make):
    tier, other = make(blocks=3), make(blocks=3)
    assert write(tier, key(0)) and write(tier, key(1))
    assert read(other, key(0))  # the file counts, not the index
    other._index.refresh()
    assert other.contains([key(0), key(1)]) == [True, True]
    os.utime(path_of(tier, key(0)), (4e9, 4e9))  # as if the other one had just read it
    assert write(tier, key(2)) and write(tier, key(3))
    assert tier.contains([key(i) for i in range(4)]) == [True, False, True, True]
    other._index.refresh()
    assert other.contains([key(i) for i in range(4)]) == [True, False, True, True]


def test_a_temporary_file_in_use_is_kept(make):
    tier = make()
    used = Path(tier._index.temporary, "used")
    Path(tier._index.temporary, "abandoned").touch()
    with used.open("w") as file:
        block_file.fcntl.flock(file, block_file.fcntl.LOCK_EX)
        make()
        assert [*Path(tier._index.temporary).iterdir()] == [used]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_failed_writes_are_misses_with_a_warning(make, monkeypatch, caplog, code):
    tier = make()
    assert write(tier, key(0))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        assert not write(tier, key(1)) and not write(tier, key(2))
    assert len(caplog.records) == 1 and os.strerror(code) in caplog.text
    assert not [*Path(tier._index.temporary).iterdir()]
    metrics = tier.metrics()
    assert metrics["kv_offload_tier_write_failures"] == metrics["kv_offload_tier_errors"] == 2
    assert tier.contains([key(0)]) == [code != errno.ENOSPC]  # makes room on a full disk
    assert write(tier, key(1)) and read(tier, key(1))


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_failed_reads_are_misses_with_a_warning(make, monkeypatch, caplog, code):
    tier = make()
    assert write(tier, key(0))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert not read(tier, key(0))
    assert os.strerror(code) in caplog.text
    assert tier.contains([key(0)]) == [False]
    assert read(tier, key(0))  # the file was not at fault


def test_a_directory_that_disappears_is_a_miss(make, caplog):
    tier = make()
    assert write(tier, key(0))
    Path(tier._index.directory).rename(Path(tier._index.directory + "-away"))
    assert not read(tier, key(0)) and not write(tier, key(1))
    assert "No such file" in caplog.text


def test_a_limit_of_file_sizes_is_a_miss(make, caplog):
    tier = make()
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, previous[1]))
    try:
        assert not write(tier, key(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    assert "short write" in caplog.text
    assert write(tier, key(0)) and read(tier, key(0))


def test_a_full_file_system_evicts_and_goes_on(make, tmp_path, caplog):
    mount = tmp_path / "full"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k,mode=700", "none", str(mount)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs: needs root")
    try:
        tier = make(mount)
        stored = [write(tier, key(i)) for i in range(40)]
        assert all(stored)
        there = [i for i in range(40) if tier.contains([key(i)])[0]]
        assert there and all_there(tier, [key(i) for i in there])
        assert not caplog.records
        tier.close()
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_without_o_direct(make, monkeypatch):
    tier, real_open, together = make(num_threads=2), os.open, threading.Barrier(2)

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            os.close(real_open(path, flags & ~os.O_DIRECT, *mode))  # as Linux
            together.wait(30)
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    writes = [tier.write(key(i), memoryview(bytes(BLOCK_BYTES))) for i in range(2)]
    assert all([f.result(60) for f in writes]) and write(tier, key(2)) and read(tier, key(2))
    assert not tier.metrics()["kv_offload_tier_errors"] and not os.listdir(tier._index.temporary)


def test_killed_writers_leave_intact_blocks(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.util.tier_crashes", str(tmp_path)]
    run = subprocess.run([*command, "7", "12"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    hits, abandoned = map(int, run.stdout.split())
    assert hits and abandoned  # writers were killed in the middle of files


def test_concurrent_reads_writes_and_evictions(make):
    """Two tiers on one directory, four threads each: right bytes or a miss."""
    tiers = [make(blocks=8, num_threads=4), make(blocks=8, num_threads=4)]
    hits, failures = [], []

    def use(tier, seed):
        rng = np.random.default_rng(seed)
        try:
            for i in rng.integers(0, 16, 150):
                action = rng.random()
                if action < 0.5:
                    hits.append(read(tier, key(i)))
                elif action < 0.95:
                    assert write(tier, key(i))
                else:
                    tier.remove([key(i)])
                if rng.random() < 0.02:
                    tier._index.refresh()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=use, args=(tier, 10 * n + i))
        for n, tier in enumerate(tiers)
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and any(hits) and not all(hits)
    for tier in tiers:
        metrics = tier.metrics()
        assert metrics["kv_offload_tier_corrupt_blocks"] == metrics["kv_offload_tier_errors"] == 0
        tier._index.refresh()
        tier._evict(0)
        assert metrics["kv_offload_tier_evicted_blocks"] > 0
    files = [*Path(tiers[0]._index.directory).rglob("*.kv")]
    assert len(files) <= 8


def test_fewer_blocks_than_threads(make, monkeypatch):
    third, write_file = threading.Barrier(3), block_file.write

    def write_together(*arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            third.wait(0.2)
        write_file(*arguments)

    monkeypatch.setattr(block_file, "write", write_together)
    tier = make(blocks=2)
    blocks = [memoryview(content(key(i), BLOCK_BYTES)) for i in range(9)]
    written = [tier.write(key(i), block) for i, block in enumerate(blocks)]
    assert all(future.result(TIMEOUT_S) for future in written)
    assert len([*Path(tier._index.directory).rglob("*.kv")]) <= 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_bytes": 0, "capacity_bytes": 1 << 20}, "block_bytes=0"),
        ({"block_bytes": 1 << 31, "capacity_bytes": 1 << 40}, "block_bytes=2147483648"),
        ({"block_bytes": 4.5, "capacity_bytes": 1 << 20}, "block_bytes is of type float"),
        ({"block_bytes": 4096, "capacity_bytes": 8191}, "capacity_bytes=8191; .* 8192 bytes of a"),
        ({"block_bytes": 4096, "capacity_bytes": 1e6}, "capacity_bytes is of type float"),
        ({"block_bytes": 1, "capacity_bytes": 1 << 20, "num_threads": 0}, "num_threads=0"),
    ],
)
def test_arguments_out_of_range(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        FileTier(tmp_path, **options)


def test_keys_that_no_file_can_have(make):
    tier = make()
    longest = bytes(queued.MAX_KEY_BYTES)
    assert write(tier, longest) and read(tier, longest)
    block = memoryview(bytes(tier.block_bytes))
    for bad in (b"", longest + b"x", "text"):
        for use in (
            lambda bad=bad: tier.write(bad, block),
            lambda bad=bad: tier.remove([bad]),
            lambda bad=bad: tier.contains([longest, bad]),
        ):
            with pytest.raises(ValueError, match=r"key .* is not 1 to 120 bytes"):
                use()


def test_files_that_cannot_be_removed(make, monkeypatch):
    """The caller learns that bytes it does not trust are still there; the others are removed."""
    tier = make()
    assert all(write(tier, key(i)) for i in range(3))
    unlink = os.unlink

    def refused(path, **options):
        if path == tier._index.path(key(1)):
            raise PermissionError(errno.EPERM, "injected", path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(PermissionError):
        tier.remove([key(0), key(1), key(2), key(9)])
    assert tier.metrics()["kv_offload_tier_errors"] == 1
    assert [os.path.exists(tier._index.path(key(i))) for i in range(3)] == [False, True, False]


def test_a_block_removed_during_its_read_is_not_found(make, monkeypatch):
    tier = make()
    assert write(tier, key(0))
    read_file = block_file.read

    def removed_meanwhile(*arguments):
        intact = read_file(*arguments)
        tier.remove([key(0)])
        return intact

    monkeypatch.setattr(block_file, "read", removed_meanwhile)
    assert read(tier, key(0)) and tier.contains([key(0)]) == [False]
