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


def contiguous_copy(direction: str, nbytes: int, *, again: bool = False) -> tuple[str, float]:
    """Bandwidth of one contiguous copy between host and device memory, best of several.

    Args:
      direction: "load" (host to device) or "store" (device to host).
      nbytes: size of the copy.
      again: measure once more; the result is the best of all measurements.

    Returns:
      A description of the copy, and GB/s: by the CUDA driver between pinned and device memory on a
      GPU, otherwise a NumPy copy.
    """
    copy = _copy("cuMemcpyHtoDAsync" if direction == "load" else "cuMemcpyDtoHAsync", nbytes)
    if again:
        copy.measure()
    return copy.name, copy.rate


def device_copy(nbytes: int = 512 << 20) -> tuple[str, float]:
    """Bandwidth of one contiguous copy within device memory; each byte is counted once."""
    copy = _copy(WITHIN_DEVICE, nbytes)
    return copy.name, copy.rate


class _Copy:
    """A copy of `nbytes` by `run`; `rate` in GB/s is the best so far."""

    def __init__(self, name: str, run: Callable[[], None], nbytes: int):
        self.name, self.rate, self._run, self._nbytes = name, 0.0, run, nbytes
        run()
        self.measure()

    def measure(self) -> None:
        for _ in range(REPEATS):
            start = time.perf_counter()
            self._run()
            self.rate = max(self.rate, self._nbytes / (time.perf_counter() - start) / 1e9)


@functools.cache  # keeps the memory for the next measurement
def _copy(function: str, nbytes: int) -> _Copy:
    import jax

    if jax.default_backend() == "gpu":
        run = _driver_copies(function, nbytes)
        return _Copy(f"{nbytes >> 20} MiB {function}", run, nbytes * COPIES_IN_FLIGHT)
    nbytes = min(nbytes, 64 << 20)
    target, source = np.empty(nbytes, np.uint8), _content(nbytes)
    name = f"{nbytes >> 20} MiB NumPy copy, one thread"
    return _Copy(name, lambda: np.copyto(target, source), nbytes)


def _driver_copies(function: str, nbytes: int) -> Callable[[], None]:
    """Copies by a function of the CUDA driver, on GPU 0 and a stream of its own."""
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
    content = _content(nbytes)
    ctypes.memmove(host, content.ctypes.data, nbytes)
    cuda.call("cuMemcpyHtoD_v2", device, host, size)
    cuda.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def run() -> None:
        cuda.call("cuCtxPushCurrent_v2", context)
        for _ in range(COPIES_IN_FLIGHT):
            cuda.call(f"{function}_v2", *ends, size, stream)
        cuda.call("cuStreamSynchronize", stream)
        cuda.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    return run


def _content(nbytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
