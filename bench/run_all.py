"""Runs benchmarks, each in a separate process: `python -m bench.run_all [--quick] [NAME...]`.

Separate processes start with empty device memory, and a failure does not stop the others. On a
machine with two GPUs the second run may be concurrent with the first, in another order:

    CUDA_VISIBLE_DEVICES=1 python -m bench.run_all --out second recurrent metadata ... &
"""

import subprocess
import sys
import time
from collections.abc import Sequence

from bench.harness.records import REPOSITORY, arguments

BENCHMARKS = {  # by record name; transfer also writes small_batches
    "transfer": "transfer",
    "pages": "pages",
    "array_caches": "array_caches",
    "engines": "engines",
    "host_pool": "host_pool",
    "overlap": "overlap",
    "dispatch": "dispatch",
    "metadata": "metadata",
    "recurrent": "recurrent",
    "sparse": "sparse.fetch",
    "sparse_decode": "sparse.decode",
    "all_reduce": "collectives.all_reduce",
    "tensor_parallel": "collectives.tensor_parallel",
    "offload_manager": "offload.manager",
    "serving": "serving.compare",
    "serving_decode": "serving.decode",
    "serving_ttft": "serving.ttft",
    "demo": "serving.demo",
}


def main(argv: Sequence[str] | None = None) -> int:
    names = {"nargs": "*", "help": f"of {', '.join(BENCHMARKS)}; all without one"}
    given = arguments(__doc__, argv, {"names": names})
    if unknown := [name for name in given.names if name not in BENCHMARKS]:
        sys.exit(f"run_all: no benchmark {', '.join(unknown)}; {names['help']}")
    flags = ["--quick"] * given.quick + (["--out", given.out] if given.out else [])
    failed = []
    for name in given.names or BENCHMARKS:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{BENCHMARKS[name]}", *flags]
        begin = time.monotonic()
        if subprocess.run(command, cwd=REPOSITORY, check=False).returncode:
            failed.append(name)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all benchmarks ran")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
