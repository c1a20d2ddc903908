"""Launches of `cuda/transfer/copy_kernel.cu`: shared memory limits of all GPUs, requested SMs.

With a runtime that launches nothing (`tests/native/copy_kernel_calls.cc`). Tests of the kernel are
in test_transfer_gpu.py.
"""

import itertools
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxkv._src.runtime import native
from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only

# Shared memory limit of a thread block, by compute capability (CUDA C++ Programming Guide,
# technical specifications), in KiB.
SHARED_KIB = {"8.6, 8.9, 12.0": 99, "8.0": 163, "9.0, 10.0": 227}
MOST_IDS = native.extension().INLINE_IDS


def share_bytes(pairs: int) -> int:
    """Minimum bytes for a thread block to check this number of pairs: see `ShareSize`."""
    slots = 1 << (min(max(pairs + pairs // 4, 32), 16 * 1024) - 1).bit_length()
    return 8 * 1024 + 8 * pairs + 4 * slots


def share_of(num_ids: int, thread_blocks: int) -> int:
    """Maximum number of ids checked by a thread block: a stretch may start and end within one."""
    return min(num_ids, -(-num_ids // thread_blocks) + 2)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy_kernel")
    return build("copy_kernel_calls", folder, "cuda/transfer/copy_kernel.cu")


@settings(max_examples=80)
@given(
    kib=st.sampled_from(list(SHARED_KIB.values())),
    static_bytes=st.integers(0, 1024),
    to_dense=st.booleans(),
    num_sms=st.integers(1, 132),
    num_ids=st.integers(0, MOST_IDS),
    checked=st.booleans(),
    block_bytes=st.sampled_from([1, 2, 4, 8, 16, 96, 1024, 8192, 1 << 20]),
    num_buffers=st.integers(1, 300),
)
@example(99, 1024, True, 1, MOST_IDS, False, 16, 1)
@example(99, 1024, True, 1, MOST_IDS, True, 16, 1)
@example(99, 0, True, 1, 4000, False, 16, 1)  # without room for a copy of the ids
def test_launch_configurations_fit(
    program, kib, static_bytes, to_dense, num_sms, num_ids, checked, block_bytes, num_buffers
):
    numbers = (
        kib * 1024,
        static_bytes,
        to_dense,
        num_sms,
        num_ids,
        checked,
        block_bytes,
        num_buffers,
    )
    command = [program, *(str(int(number)) for number in numbers)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    *launches, error = ran.stdout.splitlines()
    assert not error and launches
    room = kib * 1024 - static_bytes
    most_blocks = num_sms
    if not checked and share_bytes(share_of(num_ids, num_sms)) > room:
        # On more SMs: doubled until there is room.
        fits = (b for b in itertools.count(1) if share_bytes(share_of(num_ids, b)) <= room)
        most_blocks = 2 * next(fits)
    for thread_blocks, shared in (map(int, launch.split()) for launch in launches):
        assert shared <= room
        assert 1 <= thread_blocks <= most_blocks
