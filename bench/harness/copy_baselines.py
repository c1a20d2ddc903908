"""Baselines of the copy benchmarks.

Copies of blocks as in other systems:
  - cudaMemcpyBatchAsync with one descriptor per block, and a loop of cudaMemcpyAsync, between the
    same arrays and with the same ids as jaxkv. They are timed outside JAX (`Outside`: addresses
    prepared in advance, submitted from C++) and inside a jitted program through the same kind of
    FFI call as jaxkv's (`copy`). SHORT_BATCH is the first in calls of 1024 descriptors, as in
    jaxkv's `dma`: neither is always faster, so the faster one counts. Loads from pinned memory may
    be read in any order (cudaMemcpySrcAccessOrderAny), which nothing in a load forbids.
  - a Triton kernel with vLLM's published parameters, in a process with PyTorch, on its own arrays
    and ids: `triton`.

The native part is bench/harness/copy_baselines.cc, compiled on first use.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bench.harness import processes
from bench.harness.records import REPOSITORY

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
BATCH, LOOP = "cudaMemcpyBatchAsync", "cudaMemcpyAsync loop"
SHORT_BATCH, SHORT_BATCH_SIZE = f"{BATCH}, 1024 per call", 1024
CODES = {BATCH: 0, LOOP: 1, SHORT_BATCH: 2}  # the enum of bench/harness/copy_baselines.cc
TRITON, TRITON_TIMEOUT_S = "Triton, 12 programs", 300.0


@functools.cache
def library() -> ctypes.CDLL:
    """The native part, with its FFI targets registered.

    Raises:
      RuntimeError: no compiler, or its error output.
    """
    cuda = jax.default_backend() == "gpu"
    loaded = ctypes.CDLL(str(compiled(SOURCE, cuda=cuda)))
    platform = "CUDA" if cuda else "cpu"
    for name in ("Stamp", "BaselineCopy") if cuda else ("Stamp",):
        target = jax.ffi.pycapsule(getattr(loaded, name))
        jax.ffi.register_ffi_target(f"bench_{name}", target, platform=platform)
    if cuda:
        loaded.baseline_error.restype = ctypes.c_char_p
    return loaded


def compiled(source: pathlib.Path, *, cuda: bool) -> pathlib.Path:
    """The shared library of a native source, compiled if it has changed.

    Raises:
      RuntimeError: no compiler, or its error output.
    """
    flags = ["-std=c++20", "-O2", "-shared", "-isystem", jax.ffi.include_dir()]
    if cuda:
        compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        flags += ["-DBENCH_CUDA", "-Xcompiler", "-fPIC"]
        flags += ["-arch=native"] if source.suffix == ".cu" else []
    else:
        compiler = os.environ.get("CXX", "c++")
        flags += ["-fPIC"]
    key = hashlib.sha256(" ".join([compiler, *flags]).encode() + source.read_bytes())
    path = REPOSITORY / "build" / f"{source.stem}_{key.hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = pathlib.Path(folder, path.name)
            command = [compiler, *flags, str(source), "-o", str(made)]
            # Preloaded sanitizer libraries would disturb the compiler.
            clean = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
            run = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
            if run.returncode:
                raise RuntimeError(f"{source.name} did not compile:\n{run.stderr}")
            made.replace(path)  # atomic: another benchmark may compile it concurrently
    return path


def reads_pinned(src: jax.Array) -> bool:
    """Whether a source is in pinned memory."""
    return src.sharding.memory_kind == "pinned_host"


def copy(
    baseline: str,
    src: jax.Array,
    dst: jax.Array,
    src_ids: jax.Array,
    dst_ids: jax.Array,
    *,
    pinned: bool,
) -> jax.Array:
    """Traces a baseline's copy of blocks, `dst[dst_ids[i]] = src[src_ids[i]]`; donate `dst`.

    Args:
      baseline: one of CODES.
      src, dst: `dtype[num_blocks, ...]` in host or device memory.
      src_ids, dst_ids: int32[n] in pinned host memory, written by the host.
      pinned: whether `src` is in pinned memory.
    """
    library()
    block_bytes = src.size // src.shape[0] * src.dtype.itemsize
    call = jax.ffi.ffi_call("bench_BaselineCopy", jax.typeof(dst), input_output_aliases={3: 0})
    return call(
        src, src_ids, dst_ids, dst, block_bytes=np.int64(block_bytes),
        baseline=np.int64(CODES[baseline]), pinned=np.int64(pinned),
    )  # fmt: skip


class Outside:
    """A baseline outside JAX, writing into JAX's array; nothing else may use the two arrays.

    Args:
      baseline: one of CODES.
      src, dst: arrays on one GPU and in its pinned host memory.
      id_sets: source and destination ids, int[n]; consecutive copies cycle through them.
    """

    def __init__(
        self,
        baseline: str,
        src: jax.Array,
        dst: jax.Array,
        id_sets: Sequence[tuple[np.ndarray, np.ndarray]],
    ):
        jax.block_until_ready((src, dst))
        block_bytes = src.size // src.shape[0] * src.dtype.itemsize
        sources, destinations = (
            side.unsafe_buffer_pointer() + np.stack(of).astype(np.uint64) * np.uint64(block_bytes)
            for side, of in zip((src, dst), zip(*id_sets, strict=True), strict=True)
        )
        self._baseline, self._pinned, self._next_set = baseline, reads_pinned(src), 0
        self._lists = destinations, sources, np.full(sources.shape[1], block_bytes, np.uint64)

    def __call__(self, calls: int) -> tuple[float, float]:
        """Seconds per copy of `calls` copies before one wait: in total, and in submissions."""
        seconds = (ctypes.c_double * 2)()
        lists = [ctypes.c_void_p(x.ctypes.data) for x in self._lists]
        num_sets, count = self._lists[0].shape
        code = library().baseline_run(
            ctypes.c_int64(CODES[self._baseline]), *lists, ctypes.c_size_t(count),
            num_sets, self._next_set, ctypes.c_int(self._pinned), calls, seconds,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"{self._baseline}: {library().baseline_error(code).decode()}")
        self._next_set = (self._next_set + calls) % num_sets
        return seconds[0], seconds[1]


def triton(**request: Any) -> dict[tuple[str, int], list[float]]:
    """Seconds of a copy by (direction, block bytes), from triton_baseline.py in its own process."""
    ran = processes.run("bench.harness.triton_baseline", [request], timeout_s=TRITON_TIMEOUT_S)
    if ran.failure:
        print(f"{TRITON}: not measured: {ran.failure}", flush=True)
    return {(one["direction"], one["bytes"]): one["seconds"] for one in ran.answers[0]}
