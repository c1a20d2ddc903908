"""Peak bandwidth: rates of contiguous copies without jaxkv code."""

import ctypes
import functools
import time
from collections.abc import Callable

import numpy as np

from jaxkv._src.environment import driver

WITHIN_DEVICE = "cuMemcpyDtoDAsync"
COPIES_IN_FLIGHT = 8
REPEATS = 5


def contiguous_copy(direction: str, nbytes: int) -> tuple[str, float]:
    """Bandwidth of one contiguous copy between host and device memory, best of several.

    Args:
      direction: "load" (host to device) or "store" (device to host).
      nbytes: size of the copy.

    Returns:
      A description of the copy, and GB/s: by the CUDA driver between pinned and device memory on a
      GPU, otherwise a NumPy copy.
    """
    return _copy("cuMemcpyHtoDAsync" if direction == "load" else "cuMemcpyDtoHAsync", nbytes)


def device_copy(nbytes: int = 512 << 20) -> tuple[str, float]:
    """Bandwidth of one contiguous copy within device memory; each byte is counted once."""
    return _copy(WITHIN_DEVICE, nbytes)


@functools.cache
def _copy(function: str, nbytes: int) -> tuple[str, float]:
    import jax

    if jax.default_backend() == "gpu":
        return f"{nbytes >> 20} MiB {function}", _driver_rate(function, nbytes)
    nbytes = min(nbytes, 64 << 20)
    target, source = np.empty(nbytes, np.uint8), _content(nbytes)
    rate = nbytes / _best(lambda: np.copyto(target, source)) / 1e9
    return f"{nbytes >> 20} MiB NumPy copy, one thread", rate


def _driver_rate(function: str, nbytes: int) -> float:
    """GB/s of a function of the CUDA driver, on GPU 0 and a stream of its own."""
    cuda = driver.Driver()
    ordinal = cuda.devices()[0]
    context = ctypes.c_void_p(cuda.get("cuDevicePrimaryCtxRetain", ctypes.c_void_p, ordinal))
    cuda.call("cuCtxPushCurrent_v2", context)
    size = ctypes.c_size_t(nbytes)
    host = ctypes.c_void_p(cuda.get("cuMemHostAlloc", ctypes.c_void_p, size, 0))
    on_device = ctypes.c_size_t(nbytes * (2 if function == WITHIN_DEVICE else 1))
    device = ctypes.c_uint64(cuda.get("cuMemAlloc_v2", ctypes.c_uint64, on_device))
    stream = ctypes.c_void_p(cuda.get("cuStreamCreate", ctypes.c_void_p, 1))  # 1: non-blocking
    ends = {
        "cuMemcpyHtoDAsync": (device, host),
        "cuMemcpyDtoHAsync": (host, device),
        WITHIN_DEVICE: (ctypes.c_uint64(device.value + nbytes), device),
    }[function]

    def run() -> None:
        for _ in range(COPIES_IN_FLIGHT):
            cuda.call(f"{function}_v2", *ends, size, stream)
        cuda.call("cuStreamSynchronize", stream)

    content = _content(nbytes)
    try:
        ctypes.memmove(host, content.ctypes.data, nbytes)
        cuda.call("cuMemcpyHtoD_v2", device, host, size)
        return nbytes * COPIES_IN_FLIGHT / _best(run) / 1e9
    finally:
        cuda.call("cuStreamDestroy_v2", stream)
        cuda.call("cuMemFree_v2", device)
        cuda.call("cuMemFreeHost", host)
        cuda.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        cuda.call("cuDevicePrimaryCtxRelease_v2", ordinal)


def _content(nbytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def _best(run: Callable[[], None]) -> float:
    """Seconds of the fastest of several runs."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    run()
    return min(seconds() for _ in range(REPEATS))
