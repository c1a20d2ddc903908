"""Peak bandwidth: rates of contiguous copies without jaxkv code."""

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from jaxkv._src.environment import driver

COPIES_IN_FLIGHT = 8
REPEATS = 5


@functools.cache
def contiguous_copy(direction: str, nbytes: int) -> tuple[str, float]:
    """Bandwidth of one contiguous copy between host and device memory, best of several.

    Args:
      direction: "load" (host to device) or "store" (device to host).
      nbytes: size of the copy.

    Returns:
      A description of the copy, and GB/s: by the CUDA driver between pinned and device memory on a
      GPU, otherwise a NumPy copy.
    """
    import jax

    mib = nbytes >> 20
    if jax.default_backend() != "gpu":
        return f"{mib} MiB NumPy copy, one thread", nbytes / _memory_copy_seconds(nbytes) / 1e9
    name = "cuMemcpyHtoDAsync" if direction == "load" else "cuMemcpyDtoHAsync"
    return f"{mib} MiB {name}", nbytes / _driver_copy_seconds(f"{name}_v2", nbytes) / 1e9


@functools.cache
def device_copy(nbytes: int = 512 << 20) -> tuple[str, float]:
    """Bandwidth of one contiguous copy within device memory, best of several.

    Returns:
      A description of the copy, and GB/s copied, each byte counted once.
    """
    import jax

    mib = nbytes >> 20
    if jax.default_backend() != "gpu":
        return contiguous_copy("load", nbytes // 8)
    with _driver_buffers(2 * nbytes) as (cuda, _, device, stream):
        ends = ctypes.c_uint64(device.value + nbytes), device
        run = _copies(cuda, "cuMemcpyDtoDAsync_v2", ends, nbytes, stream)
        return f"{mib} MiB cuMemcpyDtoDAsync", nbytes * COPIES_IN_FLIGHT / _best(run) / 1e9


def _best(run: Callable[[], None]) -> float:
    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    run()
    return min(seconds() for _ in range(REPEATS))


def _memory_copy_seconds(nbytes: int) -> float:
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    target = np.empty_like(source)
    return _best(lambda: np.copyto(target, source))


def _driver_copy_seconds(function: str, nbytes: int) -> float:
    with _driver_buffers(nbytes) as (cuda, host, device, stream):
        ends = (device, host) if "HtoD" in function else (host, device)
        return _best(_copies(cuda, function, ends, nbytes, stream)) / COPIES_IN_FLIGHT


def _copies(
    cuda: driver.Driver, function: str, ends: tuple, nbytes: int, stream: ctypes.c_void_p
) -> Callable[[], None]:
    def run() -> None:
        for _ in range(COPIES_IN_FLIGHT):
            cuda.call(function, *ends, ctypes.c_size_t(nbytes), stream)
        cuda.call("cuStreamSynchronize", stream)

    return run


@contextmanager
def _driver_buffers(nbytes: int) -> Iterator[tuple]:
    """A driver, pinned and device memory (`nbytes` random bytes), and a stream on GPU 0."""
    cuda = driver.Driver()
    ordinal = cuda.devices()[0]
    context = ctypes.c_void_p(cuda.get("cuDevicePrimaryCtxRetain", ctypes.c_void_p, ordinal))
    cuda.call("cuCtxPushCurrent_v2", context)
    size = ctypes.c_size_t(nbytes)
    host = ctypes.c_void_p(cuda.get("cuMemHostAlloc", ctypes.c_void_p, size, 0))
    device = ctypes.c_uint64(cuda.get("cuMemAlloc_v2", ctypes.c_uint64, size))
    stream = ctypes.c_void_p(cuda.get("cuStreamCreate", ctypes.c_void_p, 1))  # 1: non-blocking
    try:
        content = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        ctypes.memmove(host, content.ctypes.data, nbytes)
        cuda.call("cuMemcpyHtoD_v2", device, host, size)
        yield cuda, host, device, stream
    finally:
        cuda.call("cuStreamDestroy_v2", stream)
        cuda.call("cuMemFree_v2", device)
        cuda.call("cuMemFreeHost", host)
        cuda.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        cuda.call("cuDevicePrimaryCtxRelease_v2", ordinal)
