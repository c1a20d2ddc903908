"""`FileTier` when folders disappear, and other things take the place of its files."""

import errno
import os
import shutil
import signal
import stat
import threading
import time

import pytest

from jaxkv._src.offload.tiers import block_file, file_index, files
from jaxkv.offload import FileTier
from tests.util.tier_blocks import TIMEOUT_S, all_there, key, read, write

pytestmark = pytest.mark.host_only

BLOCK_BYTES = 5000


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes tiers of one directory, which do not scan it unasked."""
    monkeypatch.setattr(files, "_REFRESH_EVERY_S", 3600.0)
    tiers = []

    def make_tier(blocks=1000, **options):
        capacity = blocks * block_file.file_bytes(BLOCK_BYTES)
        tiers.append(FileTier(tmp_path / "tier", BLOCK_BYTES, capacity, **options))
        return tiers[-1]

    yield make_tier
    for tier in tiers:
        tier.close()


def path_of(tier, block_key):
    return tier._index.path(block_key)


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_folder_that_disappears_is_made_again(make):
    tier, other = make(), make()
    assert write(tier, key(0)) and write(other, key(1))
    gone = os.path.dirname(path_of(tier, key(0)))
    shutil.rmtree(gone)
    os.rmdir(tier._index.temporary)
    assert not write(tier, key(0))
    tier._index.refresh()
    assert tier.contains([key(0), key(1)]) == [False, True]
    assert write(tier, key(0)) and all_there(tier, [key(0), key(1)])
    assert stat.S_IMODE(os.stat(gone).st_mode) == 0o700


def test_one_folder_that_cannot_be_read_does_not_hide_the_others(make, monkeypatch, caplog):
    """The capacity applies to the others; the failure is reported once."""
    tier, other = make(blocks=3), make()
    keys = [bytes([i]) * 4 for i in range(2, 8)]
    broken = os.path.dirname(path_of(tier, bytes(4)))
    os.rmdir(broken)
    with open(broken, "w"):
        pass
    assert all(write(other, one) for one in keys)
    monkeypatch.setattr(files, "_REFRESH_EVERY_S", 0.02)
    tier._stop.set()  # ends the wait of an hour
    tier._refresher.join()
    tier._stop.clear()
    refresher = files.threading.Thread(target=tier._refresh)
    refresher.start()
    wait_until(lambda: tier.metrics()["kv_offload_tier_evicted_blocks"] >= 3)
    wait_until(lambda: tier.metrics()["kv_offload_tier_errors"] >= 2)
    tier._stop.set()
    refresher.join()
    assert sum(tier.contains(keys)) == sum(map(os.path.exists, map(tier._index.path, keys))) == 3
    assert [record.getMessage().count("Not a directory") for record in caplog.records] == [1]


@pytest.fixture
def settled(monkeypatch):
    """Folders count as unchanged from the moment in which they are read."""
    monkeypatch.setattr(file_index, "_SETTLED_S", -3600.0)


def fail(*arguments, **options):
    raise OSError(errno.EMFILE, "injected")


def test_a_block_is_found_again_after_a_failed_read(make, settled, monkeypatch):
    tier = make()
    assert write(tier, key(0))
    tier._index.refresh()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert not read(tier, key(0))
    assert tier.contains([key(0)]) == [False]
    tier._index.refresh()
    assert all_there(tier, [key(0)])


def test_a_block_dropped_during_a_scan_is_found_by_the_next(make, settled, monkeypatch):
    tier = make()
    assert write(tier, key(0))
    scan = tier._index._files

    def drop_meanwhile(folder):
        yield from scan(folder)
        tier._index.drop(key(0))

    with monkeypatch.context() as patch:
        patch.setattr(tier._index, "_files", drop_meanwhile)
        tier._index.refresh()
    tier._index.refresh()
    assert tier.contains([key(0)]) == [True]


def test_a_file_that_could_not_be_evicted_is_found_again(make, settled, monkeypatch):
    """Otherwise it would not count for the capacity any more."""
    tier = make(blocks=1)
    assert write(tier, key(0))
    tier._index.refresh()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        assert write(tier, key(1))
    tier._index.refresh()
    tier._evict(0)
    assert sum(os.path.exists(path_of(tier, key(i))) for i in range(2)) == len(tier._index) == 1


def replaced_by(kind, path):
    os.unlink(path)
    if kind == "directory":
        os.mkdir(path)
    elif kind == "symlink":
        os.symlink("/etc/hostname", path)
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
        except PermissionError:
            pytest.skip("needs root")
    elif kind == "truncated file":
        with open(path, "wb") as file:
            file.truncate(4096)


KINDS = ["directory", "symlink", "FIFO", "device", "truncated file", "nothing"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_replaces_a_file_is_a_miss(make, kind):
    """It is no reason to wait, or to turn off O_DIRECT."""
    tier = make(num_threads=1)
    assert write(tier, key(0))
    flags = tier._flags
    replaced_by(kind, path_of(tier, key(0)))
    assert not read(tier, key(0)) and tier._flags == flags
    assert write(tier, key(1)) and all_there(tier, [key(1)])


@pytest.mark.parametrize("kind", KINDS)
def test_what_replaces_a_file_is_not_taken_for_a_block(make, kind):
    tier = make()
    assert write(tier, key(0))
    replaced_by(kind, path_of(tier, key(0)))
    replaced = kind != "directory"
    assert write(tier, key(0)) == replaced and tier.contains([key(0)]) == [replaced]
    assert read(tier, key(0)) == replaced


def test_a_fifo_among_the_temporary_files_is_removed(make):
    tier = make()
    os.mkfifo(os.path.join(tier._index.temporary, "abandoned"))
    make()
    assert not os.listdir(tier._index.temporary)


def test_blocks_of_a_read_only_file_system_are_hits(make, monkeypatch):
    tier = make()
    assert write(tier, key(0))

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, "injected")

    monkeypatch.setattr(os, "utime", refuse)
    assert all_there(tier, [key(0)]) and tier.contains([key(0)]) == [True]
    assert write(tier, key(0))  # there already
    assert not write(tier, key(1))


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, which the child does not use
def test_copies_in_the_child_of_a_fork_are_misses(make):
    tier = make()
    assert write(tier, key(0))
    if (child := os.fork()) == 0:
        try:
            os._exit(read(tier, key(0)) or write(tier, key(1)))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all_there(tier, [key(0)])


@pytest.mark.filterwarnings("ignore:os.fork")
def test_the_child_of_a_fork_waits_for_no_lock_of_its_parent(make):
    """Another thread holds all of them at the fork."""
    tier = make()
    assert write(tier, key(0))
    held, forked = threading.Event(), threading.Event()

    def hold():
        with tier._state, tier._index._lock, tier._stop._cond:
            held.set()
            forked.wait(TIMEOUT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(TIMEOUT_S)
    child = os.fork()
    if not child:
        try:
            signal.alarm(int(TIMEOUT_S))  # ends a child that waits
            found = tier.contains([key(0)])
            tier.remove([key(0)])
            tier.close()
            queries = tier.metrics()["kv_offload_tier_block_queries"]
            os._exit(found != [False] or queries != 1 or os.path.exists(path_of(tier, key(0))))
        finally:
            os._exit(2)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not read(tier, key(0)) and write(tier, key(1))
